"""Verifies checkpoints, with the work shared by all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from launch.checkpoint.files import (
    find_faults,
)
from launch.distributed.collective import share

log = logging.getLogger(__name__)


def newest_undamaged(candidates: Sequence[Path], rank: int, world_size: int) -> Path | None:
    """Returns the first undamaged candidate, and logs the damage of those before it. Collective."""
    for candidate in candidates:
        faults = shared_faults(candidate, rank, world_size)
        if not faults:
            return candidate
        for fault in faults:
            log.warning("damaged checkpoint, trying the next older one: %s", fault)
    return None


def shared_faults(checkpoint: Path, rank: int, world_size: int) -> list[str]:
    """Returns the result of `find_faults`, with the files divided among the ranks. Collective."""
    return list(dict.fromkeys(fault for part in share(find_faults(checkpoint, rank, world_size)) for fault in part))
