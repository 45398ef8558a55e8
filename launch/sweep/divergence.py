"""Decides from its training losses whether a run has diverged."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.sweep.spec import Divergence

# Matches the last line of a run that was stopped by train.on_nonfinite.
_NONFINITE = re.compile(r"non-finite (?:loss|gradients) at step (\d+)")


def divergence_step(losses: Sequence[float], rule: Divergence) -> int | None:
    """Returns the step (from 1) at which a run diverged, or None.

    That is the step of the first non-finite loss, or the first at which the mean of the last `window` losses is more
    than `margin` above the lower of the first loss and the lowest such mean so far.

    Args:
        losses: The losses of steps 1, 2, … without a gap; non-finite where a step has none.
    """
    lowest = losses[0] if losses else math.nan
    total = 0.0
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            return index + 1
        total += loss
        if index < rule.window - 1:
            continue
        if index >= rule.window:
            total -= losses[index - rule.window]
        mean = total / rule.window
        if mean > lowest + rule.margin:
            return index + 1
        lowest = min(lowest, mean)
    return None


def nonfinite_step(reason: str) -> int | None:
    """Returns the step at which a run's last line reports a non-finite loss or gradients, or None."""
    match = _NONFINITE.search(reason)
    return int(match[1]) if match else None


class LossTail:
    """Reads the training losses that a run has recorded so far, incrementally."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._inode: int | None = None
        self._offset = 0
        self._losses: list[float] = []

    def read(self) -> list[float]:
        """Returns the losses of steps 1, 2, …; a restart of the run rewrites its records, which are then read again."""
        try:
            with self._path.open("rb") as stream:
                inode = os.fstat(stream.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset, self._losses = inode, 0, []
                stream.seek(self._offset)
                complete, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(complete) + len(newline)
        self._losses += [loss_of(json.loads(line)) for line in complete.splitlines()]
        return self._losses


def loss_of(record: dict[str, Any]) -> float:
    """Returns the training loss of a record, in which null stands for a non-finite value."""
    return math.inf if record["loss"] is None else float(record["loss"])
