"""Runs functions on rank 0 or on all ranks so that all ranks fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from launch.errors import SharedError

Result = TypeVar("Result")

# Errors that a user's files, disks and configuration can cause. Anything else is a bug and keeps its traceback.
EXPECTED_ERRORS = (ValueError, RuntimeError, OSError)
_LOST_CONTACT = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL", "timed out")


def on_main_rank(function: Callable[[], Result]) -> Result:
    """Runs `function` on rank 0 and returns its (picklable) result on every rank. Collective.

    Raises:
        SharedError: On every rank, with the message of what `function` raised.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [function(), None]
        except EXPECTED_ERRORS as error:
            outcome = [None, str(error)]
    dist.broadcast_object_list(outcome, src=0)
    result, problem = outcome
    if problem is not None:
        raise SharedError(problem)
    return result


def on_all_ranks(function: Callable[[], Result]) -> Result:
    """Runs `function`, which must not be collective, on every rank, and returns this rank's result. Collective.

    Raises:
        SharedError: On every rank if `function` failed on any, with all distinct messages and their ranks.
    """
    result: Any = None
    problem = None
    try:
        result = function()
    except EXPECTED_ERRORS as error:
        problem = str(error)
    problems = share(problem)
    if any(problems):
        raise SharedError(_merge(problems))
    return result


def share(value: Any) -> list[Any]:
    """Returns every rank's (small, picklable) value, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank has ended or does not respond."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST_CONTACT)


def _merge(problems: list[str | None]) -> str:
    """Merges the ranks' messages: one alone if all ranks have the same, else each with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            ranks.setdefault(problem, []).append(rank)
    if len(ranks) == 1 and None not in problems:
        return next(iter(ranks))
    return "\n".join(
        f"rank {', '.join(map(str, where))}: {line}" for text, where in ranks.items() for line in text.splitlines()
    )
