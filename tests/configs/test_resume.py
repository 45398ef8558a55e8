"""What each value of `run.resume` means: the table in configs/resume.py, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.resume import (
    allows_init_from,
    allows_repeated_starts,
    named_checkpoint,
    refuses_existing_run,
    restart_arguments,
    resumes_newest,
    stays_finished,
)


@pytest.mark.parametrize(
    ("resume", "named", "newest", "refuses", "finished", "repeated", "init_from"),
    [
        ("auto", None, True, False, True, True, True),
        ("never", None, False, True, False, False, True),
        ("runs/other", Path("runs/other"), False, False, False, False, False),
        ("Auto", Path("Auto"), False, False, False, False, False),  # a path, since the words are exact
    ],
)
def test_values(
    resume: str, named: Path | None, newest: bool, refuses: bool, finished: bool, repeated: bool, init_from: bool
) -> None:
    assert named_checkpoint(resume) == named
    assert resumes_newest(resume) == newest
    assert refuses_existing_run(resume) == refuses
    assert stays_finished(resume) == finished
    assert allows_repeated_starts(resume) == repeated
    assert allows_init_from(resume) == init_from


def test_a_restart_resumes_once_the_run_has_saved() -> None:
    first = ("a.yaml", "run.resume=runs/other", "optim.lr=1")
    assert restart_arguments(first, has_saved=False) == first
    again = restart_arguments(list(first), has_saved=True)
    assert again == (*first, "run.resume=auto")  # the last override of a key wins
    assert restart_arguments(again, has_saved=True) == again
