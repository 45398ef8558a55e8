"""The deepspeed launcher, torchrun and plain Python all train, and their failures are readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import finish, launcher_command, read_metrics, start


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]


@pytest.mark.slow
def test_all_launchers_train_alike(tiny_config: Path, tmp_path: Path) -> None:
    for launcher, num_ranks in (("plain", 1), ("deepspeed", 2), ("torchrun", 2)):
        command = launcher_command(launcher, num_ranks, "train.py", str(tiny_config), f"run.name={launcher}")
        finished = finish(start(command))
        assert finished.code == 0, finished.output + finished.errors
        assert "step 6/6" in finished.output
        assert (tmp_path / "runs" / launcher / "DONE").is_file()
    runs = tmp_path / "runs"
    assert losses(runs / "deepspeed") == losses(runs / "torchrun")
    assert losses(runs / "plain") == pytest.approx(losses(runs / "deepspeed"), rel=1e-5)


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_fault_is_one_line_and_a_failure(launcher: str, tiny_config: Path) -> None:
    command = launcher_command(launcher, 2, "train.py", str(tiny_config), "run.resume=/nowhere")
    finished = finish(start(command))
    assert finished.code != 0
    lines = [line for line in (finished.output + finished.errors).splitlines() if line.startswith("error:")]
    assert lines == ["error: /nowhere: no such checkpoint or run folder"]


def test_a_second_start_of_a_finished_run_says_so(tiny_config: Path) -> None:
    command = launcher_command("plain", 1, "train.py", str(tiny_config))
    assert finish(start(command)).code == 0
    again = finish(start(command))
    assert again.code == 0
    assert "is finished (step 6); nothing to do" in again.output
