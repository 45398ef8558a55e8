"""The README's commands, on what they prepare: the quickstart shortened to a few steps, and configs/debug.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Finished, finish, launcher_command, start


def quickstart(*arguments: str) -> Finished:
    return finish(start(["bash", "launch/quickstart.sh", *arguments]), timeout=900)


@pytest.mark.slow
def test_the_quickstart_trains_samples_and_says_where_to_look(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", "train.steps=4", "validation={every_steps: 2, batches: 1}"]
    finished = quickstart(*overrides)
    assert finished.code == 0, finished.output + finished.errors
    assert "step 4/4" in finished.output
    assert "validation" in finished.output
    assert "My fellow citizens," in finished.output
    assert f"run folder:   {tmp_path}/quickstart" in finished.output
    assert f"tensorboard --logdir {tmp_path}" in finished.output
    again = quickstart(*overrides)
    assert again.code == 0
    for text in ("nothing to install", "nothing to do", "is finished (step 4)"):
        assert text in again.output


def test_setup_only_prepares_what_debug_reads(tmp_path: Path) -> None:
    finished = quickstart("--setup-only")
    assert finished.code == 0, finished.errors
    assert "step" not in finished.output
    command = launcher_command("deepspeed", 2, "train.py", "configs/debug.yaml", f"run.dir={tmp_path}")
    finished = finish(start(command))
    assert finished.code == 0, finished.output + finished.errors
    assert "step 20/20" in finished.output


def test_unknown_arguments_are_refused() -> None:
    finished = quickstart("--fast")
    assert finished.code == 2
    assert finished.errors == "error: unknown argument --fast (expected --setup-only or key=value)\n"
