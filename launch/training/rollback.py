"""Going back to the last good checkpoint after an anomaly."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from configs.schema import Config
from data.skips import SkippedSamples
from launch.checkpoint.files import read_state
from launch.checkpoint.verify import newest_good
from launch.distributed.collective import on_main_rank
from launch.distributed.topology import Topology
from launch.errors import SharedError
from launch.run_folder.checkpoints import list_checkpoints
from launch.run_folder.folder import RunFolder
from launch.training.resume import Start

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollback:
    """A step at fault, from which the run is to go back to its last checkpoint.

    Attributes:
        step: number of the step.
        consumed_samples: of the run, with those of the step.
        skipped: what the run left out up to then.
        reason: what is wrong, in one line.
    """

    step: int
    consumed_samples: int
    skipped: SkippedSamples
    reason: str


def roll_back(
    rollback: Rollback,
    first_start: Start,
    config: Config,
    folder: RunFolder,
    topology: Topology,
    taken: Counter[Path | None],
) -> Start:
    """The last checkpoint of this run that verifies, or the run's beginning before the first. Collective.

    The samples from there to the bad step, this included, are left out from now on.

    Args:
        first_start: of this process.
        taken: how often the run has gone back to each checkpoint; counted up.

    Raises:
        SharedError: all are damaged, or it has gone back to the same one too often.
    """
    gc.collect()  # the engine that was given up; its memory is needed for the next one
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    candidates = on_main_rank(lambda: _own_checkpoints(first_start, folder))
    checkpoint = newest_good(candidates, topology.rank, topology.world_size)
    begins_again = checkpoint is None and not candidates and first_start.state is None
    if begins_again and first_start.checkpoint is not None:
        begins_again = newest_good([first_start.checkpoint], topology.rank, topology.world_size) is not None
    if checkpoint is None and not begins_again:
        raise SharedError(f"{rollback.reason}; there is no undamaged checkpoint to go back to")
    where = checkpoint or "the start of the run"
    if taken[checkpoint] == config.train.max_rollbacks:
        raise SharedError(
            f"{rollback.reason}; the run has gone back to {where} {taken[checkpoint]} times already "
            "(train.max_rollbacks)"
        )
    taken[checkpoint] += 1
    start = first_start
    if checkpoint is not None:
        start = Start(checkpoint, on_main_rank(lambda: read_state(checkpoint)))
    consumed_samples = start.state.consumed_samples if start.state else 0
    edges = rollback.skipped.places(np.array([consumed_samples, rollback.consumed_samples - 1]))
    first, last = edges.tolist()
    log.warning(
        "going back to %s (rollback %d of at most %d to there); the %d samples from there to step %d are left out",
        where,
        taken[checkpoint],
        config.train.max_rollbacks,
        rollback.consumed_samples - consumed_samples,
        rollback.step,
    )
    return replace(start, skipped=rollback.skipped.with_range(first, last + 1))


def _own_checkpoints(first_start: Start, folder: RunFolder) -> list[Path]:
    """The checkpoints that lead to where the run is, newest first. The folder may hold another branch's beside them."""
    saved = list(reversed(list_checkpoints(folder.checkpoints)))
    if first_start.state is None:
        return [path for _, path in saved]
    assert first_start.checkpoint is not None
    if first_start.checkpoint.resolve().parent == folder.checkpoints.resolve():
        return [path for _, path in saved]
    return [*(path for step, path in saved if step > first_start.step), first_start.checkpoint]
