"""Errors that end a run with one readable line, and the exit codes."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped on request after a checkpoint; the same command continues


INTERRUPTED = "interrupted; the run can continue from its last checkpoint"


class RunError(RuntimeError):
    """An error that a user can understand and fix, as one readable line."""


class SharedError(RunError):
    """A RunError that every rank raises with the same message, so that only rank 0 needs to print it."""
