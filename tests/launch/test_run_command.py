"""`launch.run`: signals, exit codes, restarts, and no process left, whoever dies."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.errors import EXIT_STOPPED
from launch.process.lifeline import (
    RankOutcome,
    announce_rank,
    find_guardians,
    is_alive,
    read_announcements,
    read_outcomes,
    report_outcome,
)
from launch.run_folder.checkpoints import list_checkpoints, newest_checkpoint
from launch.run_folder.folder import RunFolder
from launch.run_folder.observe import Progress, done_step
from launch.supervisor.attempt import Launch
from launch.supervisor.supervise import restarted
from tests.conftest import finish, launcher_command, python, read_metrics, start
from tests.launch.helpers.supervised import (
    parent_of,
    supervisor_command,
    wait_for_end,
    wait_for_ranks,
    wait_for_steps,
    wait_until,
)

ENDLESS = ("train.steps=100000", "checkpoint.every_steps=10")


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder)]


def test_help_is_fast_and_needs_no_torch() -> None:
    for module in ("launch.run", "launch.chaos"):
        code = f"import sys, {module}\nassert not {{'torch', 'deepspeed'}} & set(sys.modules)"
        assert python("-c", code).code == 0
        assert "CONFIG.yaml" in python("-m", module, "--help").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.lrr=1"], "error: optim.lrr: unknown key; did you mean optim.lr?"),
        (["--launcher", "python", "--num-ranks", "2"], "--launcher python starts one rank"),
        (["--num-ranks", "0"], "'0' is not a whole number from 1 on"),
        (["--max-restarts", "-1"], "'-1' is not a whole number from 0 on"),
    ],
)
def test_wrong_usage_starts_nothing(arguments: list[str], message: str, tiny_config: Path, tmp_path: Path) -> None:
    finished = python("-m", "launch.run", tiny_config, *arguments)
    assert finished.code == 2
    assert message in finished.errors
    assert "started" not in finished.output
    assert not (tmp_path / "runs").exists()


def test_a_killed_rank_restarts_the_run_and_a_signal_reaches_every_rank(tiny_config: Path, tmp_path: Path) -> None:
    """The deepspeed launcher: a start, a SIGKILL, a restart, a SIGTERM; then the same command finishes the run."""
    folder = tmp_path / "runs/tiny"
    process = start(supervisor_command("deepspeed", 2, tiny_config, *ENDLESS, restarts=1))
    ranks = wait_for_ranks(process, 2)
    wait_for_steps(process, folder, 12)
    ranks[1].kill()
    again = wait_for_ranks(process, 2, other_than=ranks)
    progress = Progress(folder)
    wait_until(lambda: progress.last_step() > 12, "a step after the restart", process)
    process.send_signal(signal.SIGTERM)
    finished = finish(process, timeout=120)
    assert finished.code == EXIT_STOPPED, finished.output + finished.errors
    assert "failed: rank 1 was killed or crashed; restart 1 of 1 in 1 s" in finished.output
    assert finished.output.count("got SIGTERM; forwarding it to every rank") == 1
    assert finished.output.count("SIGTERM: stopping after a checkpoint") == 1  # rank 0 speaks
    assert finished.output.count("stopped on request; the same command continues from") == 1
    assert not any(map(is_alive, [*ranks.values(), *again.values()]))
    last, _ = list_checkpoints(folder / "checkpoints")[-1]
    assert steps(folder) == list(range(1, last + 1))
    assert not (folder / "DONE").exists()

    finished = finish(start(supervisor_command("python", 1, tiny_config, *ENDLESS, f"train.stop_step={last + 3}")))
    assert finished.code == 0, finished.output + finished.errors
    assert done_step(folder) == last + 3
    assert steps(folder) == list(range(1, last + 4))


def test_a_second_sigint_kills_at_once(tiny_config: Path, tmp_path: Path) -> None:
    """Here while a rank stands still, so that no checkpoint can come to its end."""
    process = start(supervisor_command("torchrun", 2, tiny_config, *ENDLESS, restarts=3))
    ranks = wait_for_ranks(process, 2)
    wait_for_steps(process, tmp_path / "runs/tiny", 3)
    ranks[0].suspend()
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    finished = finish(process, timeout=60)
    assert time.monotonic() - begin < 15
    assert finished.code == 1
    assert finished.errors.splitlines()[-1] == "error: interrupted; the run can go on from its last checkpoint"
    assert not any(map(is_alive, ranks.values()))


def test_a_run_whose_output_nobody_reads_any_more_stops_with_a_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
    """Ctrl-C in `launch.run … | tee log` ends `tee` as well."""
    process = start(supervisor_command("python", 1, tiny_config, *ENDLESS))
    wait_for_steps(process, tmp_path / "runs/tiny", 3)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == EXIT_STOPPED
    last, _ = list_checkpoints(tmp_path / "runs/tiny/checkpoints")[-1]
    assert steps(tmp_path / "runs/tiny") == list(range(1, last + 1))


def test_nobody_outlives_a_killed_supervisor(tiny_config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/tiny"
    process = start(supervisor_command("torchrun", 2, tiny_config, *ENDLESS))
    ranks = wait_for_ranks(process, 2)
    launcher = parent_of(ranks)
    wait_for_steps(process, folder, 3)
    process.kill()
    assert wait_for_end([*ranks.values(), launcher]) < 30
    process.communicate()
    last, _ = list_checkpoints(folder / "checkpoints")[-1]
    assert steps(folder) == list(range(1, last + 1))  # what was trained is saved


def test_a_killed_launcher_is_a_failure_and_a_signal_before_the_first_step_stops(
    tiny_config: Path, tmp_path: Path
) -> None:
    """SIGKILL of DeepSpeed's launch.py: the runner ends with 0, and its ranks would be orphans."""
    folder = tmp_path / "runs/tiny"
    process = start(supervisor_command("deepspeed", 2, tiny_config, *ENDLESS, restarts=1))
    ranks = wait_for_ranks(process, 2)
    wait_for_steps(process, folder, 3)
    parent_of(ranks).kill()
    assert wait_for_end(ranks.values()) < 30
    again = wait_for_ranks(process, 2, other_than=ranks)
    process.send_signal(signal.SIGUSR1)
    finished = finish(process, timeout=60)
    assert finished.code == EXIT_STOPPED, finished.output + finished.errors
    assert "failed: deepspeed ended while ranks were running; restart 1 of 1" in finished.output
    assert not any(map(is_alive, again.values()))


def test_failures_end_with_their_reason(tiny_config: Path) -> None:
    finished = finish(start(supervisor_command("python", 1, tiny_config, "run.resume=/nowhere", restarts=1)))
    assert finished.code == 1
    assert "restart 1 of 1 in 1 s" in finished.output
    assert finished.errors.splitlines()[-1] == "error: rank 0: /nowhere: no such checkpoint or run folder"


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_ranks_of_bare_launchers_stop_when_these_are_killed(launcher: str, tiny_config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/tiny"
    process = start(launcher_command(launcher, 2, "train.py", str(tiny_config), *ENDLESS))
    ranks = wait_for_ranks(process, 2)
    wait_for_steps(process, folder, 3)
    parent_of(ranks).kill()
    assert wait_for_end(ranks.values()) < 30
    output, _ = process.communicate(timeout=60)
    assert "stopped on request after step" in output
    last, _ = list_checkpoints(folder / "checkpoints")[-1]
    assert steps(folder) == list(range(1, last + 1))
    if launcher == "deepspeed":
        assert process.returncode == 0  # of the runner, although its launch.py was killed: do not trust it


def test_sigterm_to_the_bare_deepspeed_command_saves_a_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
    """It ends at once and tells nobody; the ranks notice."""
    folder = tmp_path / "runs/tiny"
    process = start(launcher_command("deepspeed", 2, "train.py", str(tiny_config), *ENDLESS))
    ranks = wait_for_ranks(process, 2)
    launcher = parent_of(ranks)
    wait_for_steps(process, folder, 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM
    assert wait_for_end([*ranks.values(), launcher]) < 45
    last, _ = list_checkpoints(folder / "checkpoints")[-1]
    assert steps(folder) == list(range(1, last + 1))


def test_sigterm_to_bare_torchrun_saves_a_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
    """It forwards the signal, and would kill after 30 s."""
    folder = tmp_path / "runs/tiny"
    process = start(launcher_command("torchrun", 2, "train.py", str(tiny_config), *ENDLESS))
    ranks = wait_for_ranks(process, 2)
    wait_for_steps(process, folder, 3)
    process.send_signal(signal.SIGTERM)
    finished = finish(process, timeout=60)
    assert finished.code != 0
    assert "stopped on request after step" in finished.output
    assert not any(map(is_alive, ranks.values()))
    last, _ = list_checkpoints(folder / "checkpoints")[-1]
    assert steps(folder) == list(range(1, last + 1))


def test_ranks_and_supervisor_know_of_each_other(tmp_path: Path) -> None:
    environ = {"STEADYHEAD_RANKS": str(tmp_path), "RANK": "3"}
    announce_rank(environ)
    report_outcome(RankOutcome(1, "two\nlines"), environ)
    assert read_announcements(tmp_path) == {3: os.getpid()}
    assert read_outcomes(tmp_path) == {3: RankOutcome(1, "two lines")}
    announce_rank({})  # without a supervisor nothing happens
    report_outcome(RankOutcome(0), {})
    report_outcome(RankOutcome(0), {**environ, "STEADYHEAD_RANKS": "/nowhere"})  # nor when it is gone


def test_guardians_are_launchers_and_supervisors_but_no_shells() -> None:
    parents = psutil.Process().parents()
    assert find_guardians({}) == []
    assert find_guardians({"TORCHELASTIC_RUN_ID": "x"}) == parents[:1]
    assert find_guardians({"CROSS_SIZE": "1"}) == parents[:1]
    assert find_guardians({"STEADYHEAD_SUPERVISOR": str(parents[-1].pid)}) == parents
    with pytest.raises(RuntimeError, match="ended during the start"):
        find_guardians({"STEADYHEAD_SUPERVISOR": str(os.getpid())})


def test_a_restart_goes_on_from_what_was_saved_since(tmp_path: Path) -> None:
    launch = Launch("python", 1, ("a.yaml", "run.resume=never"))
    assert newest_checkpoint(tmp_path / "checkpoints") == (0, None)
    assert restarted(launch, RunFolder(tmp_path), begin=0.0) == launch
    for name in ("step_00000010", "step_00000020", "step_00000030.partial", "step_00000040.superseded"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path / "checkpoints") == (20, tmp_path / "checkpoints/step_00000020")
    assert restarted(launch, RunFolder(tmp_path), begin=time.time() + 100) == launch  # older than this
    resumed = restarted(launch, RunFolder(tmp_path), begin=0.0)
    assert resumed.arguments == ("a.yaml", "run.resume=never", "run.resume=auto")
    assert restarted(resumed, RunFolder(tmp_path), begin=0.0) == resumed


def test_launcher_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    command = Launch("deepspeed", 2, ("a.yaml",)).command(Path())
    assert command[-4:-2] == ["--num_gpus", "2"] and command[-1] == "a.yaml"
    assert Launch("python", 1, ("a.yaml",)).command(Path())[0] == sys.executable
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,5")
    assert Launch("deepspeed", 2, ("a.yaml",)).command(Path())[-4:-2] == ["--include", "localhost:2,3"]
