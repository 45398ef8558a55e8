"""The names of a run's checkpoints, without importing torch.

checkpoints/step_00001000/              a committed checkpoint
checkpoints/step_00001000.partial/      being written or deleted, or left by a run that was killed meanwhile
checkpoints/step_00001000.superseded/   renamed, because it is beyond the step at which a later start began
"""

from __future__ import annotations

import re
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
SUPERSEDED_SUFFIX = ".superseded"
_NAME = re.compile(r"^step_(\d{8,})$")


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    """The final name of the checkpoint after `step` finished steps."""
    return checkpoints / f"step_{step:08d}"


def partial_path(final: Path) -> Path:
    """The name under which a checkpoint is written before it is committed."""
    return final.with_name(final.name + PARTIAL_SUFFIX)


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of every committed checkpoint, oldest first."""
    if not checkpoints.is_dir():
        return []
    matches = ((_NAME.match(path.name), path) for path in checkpoints.iterdir() if path.is_dir())
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def newest_checkpoint(checkpoints: Path) -> tuple[int, Path | None]:
    """Returns (step, folder) of the newest committed checkpoint, without verifying it; (0, None) if there is none."""
    return max(list_checkpoints(checkpoints), default=(0, None))


def is_saving(checkpoints: Path) -> bool:
    """Whether a checkpoint is being written, or was when the run was killed."""
    return any(checkpoints.glob(f"step_*{PARTIAL_SUFFIX}"))
