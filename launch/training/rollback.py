"""Rolls a run back to its last undamaged checkpoint after an anomaly."""

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
from launch.checkpoint.verify import newest_undamaged
from launch.distributed.collective import on_main_rank
from launch.distributed.topology import Topology
from launch.errors import SharedError
from launch.run_folder.checkpoints import list_checkpoints
from launch.run_folder.folder import RunFolder
from launch.training.resume import Start

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollback:
    """A request to roll back because of an anomalous step.

    Attributes:
        step: The number of the step.
        consumed_samples: The number of samples that the run has used, including those of the step.
        skipped: The samples that the run has skipped so far.
        reason: The anomaly, in one line.
    """

    step: int
    consumed_samples: int
    skipped: SkippedSamples
    reason: str


def choose_rollback_start(
    rollback: Rollback,
    first_start: Start,
    config: Config,
    folder: RunFolder,
    topology: Topology,
    num_rollbacks: Counter[Path | None],
) -> Start:
    """Returns a start from the run's last undamaged checkpoint, or from its beginning if it has none yet. Collective.

    The samples between that start and the end of the anomalous step are skipped from then on.

    Args:
        first_start: The start of this process.
        num_rollbacks: The number of rollbacks to each checkpoint so far; incremented.

    Raises:
        SharedError: All checkpoints are damaged, or the run has rolled back to the same one too often.
    """
    gc.collect()  # frees the memory of the old engine for the next one
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    candidates = on_main_rank(lambda: _own_checkpoints(first_start, folder))
    checkpoint = newest_undamaged(candidates, topology.rank, topology.world_size)
    restarts = checkpoint is None and not candidates and first_start.state is None
    if restarts and first_start.checkpoint is not None:
        restarts = newest_undamaged([first_start.checkpoint], topology.rank, topology.world_size) is not None
    if checkpoint is None and not restarts:
        raise SharedError(f"{rollback.reason}; there is no undamaged checkpoint to roll back to")
    where = checkpoint or "the start of the run"
    if num_rollbacks[checkpoint] == config.train.max_rollbacks:
        raise SharedError(
            f"{rollback.reason}; the run has already rolled back to {where} {num_rollbacks[checkpoint]} times "
            "(train.max_rollbacks)"
        )
    num_rollbacks[checkpoint] += 1
    start = first_start
    if checkpoint is not None:
        start = Start(checkpoint, on_main_rank(lambda: read_state(checkpoint)))
    consumed_samples = start.state.consumed_samples if start.state else 0
    edges = rollback.skipped.places(np.array([consumed_samples, rollback.consumed_samples - 1]))
    first, last = edges.tolist()
    log.warning(
        "rolling back to %s (%d of at most %d times); the %d samples from there to step %d are skipped",
        where,
        num_rollbacks[checkpoint],
        config.train.max_rollbacks,
        rollback.consumed_samples - consumed_samples,
        rollback.step,
    )
    return replace(start, skipped=rollback.skipped.with_range(first, last + 1))


def _own_checkpoints(first_start: Start, folder: RunFolder) -> list[Path]:
    """The checkpoints of the current run, newest first, without those of an abandoned branch in the same folder."""
    saved = list(reversed(list_checkpoints(folder.checkpoints)))
    if first_start.state is None:
        return [path for _, path in saved]
    assert first_start.checkpoint is not None
    if first_start.checkpoint.resolve().parent == folder.checkpoints.resolve():
        return [path for _, path in saved]
    return [*(path for step, path in saved if step > first_start.step), first_start.checkpoint]
