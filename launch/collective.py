"""Small agreements between ranks: run something once for all, and share values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from launch.errors import SharedError

Result = TypeVar("Result")


def on_main_rank(function: Callable[[], Result]) -> Result:
    """Runs `function` on rank 0 and returns its (picklable) result on every rank. Collective.

    Raises:
        SharedError: on every rank, with the message of the ValueError, RuntimeError or OSError raised on rank 0.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [function(), None]
        except (ValueError, RuntimeError, OSError) as error:
            outcome = [None, str(error)]
    dist.broadcast_object_list(outcome, src=0)
    result, problem = outcome
    if problem is not None:
        raise SharedError(problem)
    return result


def share(value: Any) -> list[Any]:
    """Every rank's (small, picklable) value, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
