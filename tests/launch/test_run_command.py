"""`launch.run`: signals, exit codes, restarts, and no process left behind, whichever process dies."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.errors import EXIT_STOPPED
from launch.process.rank_status import (
    RankOutcome,
    find_watched_parents,
    is_alive,
    read_outcomes,
    read_registered_ranks,
    register_rank,
    report_outcome,
)
from launch.run_folder.checkpoints import list_checkpoints, newest_checkpoint
from launch.run_folder.folder import RunFolder
from launch.run_folder.observe import Progress, done_step
from launch.supervisor.attempt import Launch
from launch.supervisor.supervise import launch_for_restart
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
    arguments = {"launch.run": "CONFIG.yaml", "launch.chaos": "CONFIG.yaml", "launch.node_agent": "LIMIT_SECONDS"}
    for module, argument in arguments.items():
        code = f"import sys, {module}\nassert not {{'torch', 'deepspeed'}} & set(sys.modules)"
        assert python("-c", code).code == 0
        assert argument in python("-m", module, "--help").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.lrr=1"], "error: optim.lrr: unknown key; did you mean optim.lr?"),
        (["--launcher", "python", "--num-ranks", "2"], "--launcher python starts one rank"),
        (["--num-ranks", "0"], "'0' is not valid; expected an integer of at least 1"),
        (["--max-restarts", "-1"], "'-1' is not valid; expected an integer of at least 0"),
    ],
)
def test_wrong_usage_starts_nothing(arguments: list[str], message: str, tiny_config: Path, tmp_path: Path) -> None:
    finished = python("-m", "launch.run", tiny_config, *arguments)
    assert finished.code == 2
    assert message in finished.errors
    assert "started" not in finished.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
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
    assert finished.output.count("SIGTERM: stopping after a checkpoint") == 1  # only rank 0 prints
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
    """While a rank is suspended, so that no checkpoint can complete."""
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
    assert finished.errors.splitlines()[-1] == "error: interrupted; the run can continue from its last checkpoint"
    assert not any(map(is_alive, ranks.values()))


def test_a_run_whose_output_is_closed_stops_with_a_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
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


def test_no_process_outlives_a_killed_supervisor(tiny_config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/tiny"
    process = start(supervisor_command("torchrun", 2, tiny_config, *ENDLESS))
    ranks = wait_for_ranks(process, 2)
    launcher = parent_of(ranks)
    wait_for_steps(process, folder, 3)
    process.kill()
    assert wait_for_end([*ranks.values(), launcher]) < 30
    process.communicate()
    last, _ = list_checkpoints(folder / "checkpoints")[-1]
    assert steps(folder) == list(range(1, last + 1))  # every recorded step is saved


@pytest.mark.slow
def test_a_killed_launcher_is_a_failure_and_a_signal_before_the_first_step_stops(
    tiny_config: Path, tmp_path: Path
) -> None:
    """SIGKILL of DeepSpeed's launch.py: the runner exits with 0 and leaves orphaned ranks."""
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
        assert process.returncode == 0  # the runner's code, although its launch.py was killed: not to be trusted


def test_sigterm_to_the_bare_deepspeed_command_saves_a_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
    """It exits at once without signalling the ranks, which notice."""
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
    """It forwards the signal, and would kill the ranks after 30 s."""
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


def test_ranks_report_to_the_supervisor(tmp_path: Path) -> None:
    environ = {"STEADYHEAD_RANKS": str(tmp_path), "RANK": "3"}
    register_rank(environ)
    report_outcome(RankOutcome(1, "two\nlines"), environ)
    assert read_registered_ranks(tmp_path) == {3: os.getpid()}
    assert read_outcomes(tmp_path) == {3: RankOutcome(1, "two lines")}
    register_rank({})  # without a supervisor nothing happens
    report_outcome(RankOutcome(0), {})
    report_outcome(RankOutcome(0), {**environ, "STEADYHEAD_RANKS": "/nowhere"})  # nor when it has ended


def test_launchers_and_supervisors_are_watched_but_not_shells() -> None:
    parents = psutil.Process().parents()
    assert find_watched_parents({}) == []
    assert find_watched_parents({"TORCHELASTIC_RUN_ID": "x"}) == parents[:1]
    assert find_watched_parents({"CROSS_SIZE": "1"}) == parents[:1]
    assert find_watched_parents({"STEADYHEAD_SUPERVISOR": str(parents[-1].pid)}) == parents
    with pytest.raises(RuntimeError, match="ended during the start"):
        find_watched_parents({"STEADYHEAD_SUPERVISOR": str(os.getpid())})


def test_a_restart_resumes_from_a_checkpoint_saved_since(tmp_path: Path) -> None:
    launch = Launch("python", 1, ("a.yaml", "run.resume=never"))
    assert newest_checkpoint(tmp_path / "checkpoints") == (0, None)
    assert launch_for_restart(launch, RunFolder(tmp_path), begin=0.0) == launch
    for name in ("step_00000010", "step_00000020", "step_00000030.partial", "step_00000040.superseded"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path / "checkpoints") == (20, tmp_path / "checkpoints/step_00000020")
    assert launch_for_restart(launch, RunFolder(tmp_path), begin=time.time() + 100) == launch  # saved before
    resumed = launch_for_restart(launch, RunFolder(tmp_path), begin=0.0)
    assert resumed.arguments == ("a.yaml", "run.resume=never", "run.resume=auto")
    assert launch_for_restart(resumed, RunFolder(tmp_path), begin=0.0) == resumed


def test_launcher_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    command = Launch("deepspeed", 2, ("a.yaml",)).command(Path())
    assert command[-4:-2] == ["--num_gpus", "2"] and command[-1] == "a.yaml"
    assert Launch("python", 1, ("a.yaml",)).command(Path())[0] == sys.executable
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,5")
    assert Launch("deepspeed", 2, ("a.yaml",)).command(Path())[-4:-2] == ["--include", "localhost:2,3"]
