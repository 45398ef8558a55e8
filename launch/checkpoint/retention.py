"""Checkpoint retention: pruning, cleaning up after killed saves, and renaming superseded checkpoints."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from configs.schema import CheckpointConfig
from launch.run_folder.checkpoints import PARTIAL_SUFFIX, SUPERSEDED_SUFFIX, list_checkpoints, partial_path

log = logging.getLogger(__name__)


def prune_checkpoints(checkpoints: Path, config: CheckpointConfig) -> None:
    """Deletes all but the newest `keep_last` checkpoints and the multiples of `keep_every`. For rank 0.

    No checkpoint is newer than the one just saved, since superseded ones are renamed when the run starts. A folder that
    cannot be deleted (for example because it is being read over a network file system) only causes a warning.
    """
    for step, path in list_checkpoints(checkpoints)[: -config.keep_last]:
        if config.keep_every is None or step % config.keep_every:
            try:
                delete_checkpoint(path)
            except OSError as error:
                log.warning("the old checkpoint %s could not be deleted: %s", path, error)


def delete_checkpoint(checkpoint: Path) -> None:
    """Deletes a checkpoint. Renames it first, so that a kill never leaves half a checkpoint under its final name."""
    renamed = partial_path(checkpoint.with_name(checkpoint.name + ".old"))
    checkpoint.rename(renamed)
    shutil.rmtree(renamed)


def clean_leftovers(checkpoints: Path) -> None:
    """Deletes the leftovers of killed saves and deletions. For rank 0, before the first save."""
    for path in checkpoints.glob(f"*{PARTIAL_SUFFIX}"):
        log.info("removing %s, left by an interrupted save", path)
        shutil.rmtree(path, ignore_errors=True)


def supersede_newer_checkpoints(checkpoints: Path, step: int) -> None:
    """Renames checkpoints beyond the step that the run starts from (damaged or abandoned ones). For rank 0.

    Otherwise pruning would keep them instead of the run's own, and the next start would resume from them.
    """
    for newer, path in list_checkpoints(checkpoints):
        if newer > step:
            target = path.with_name(path.name + SUPERSEDED_SUFFIX)
            number = 1
            while target.exists():
                number += 1
                target = path.with_name(f"{path.name}{SUPERSEDED_SUFFIX}_{number}")
            path.rename(target)
            log.warning("%s is beyond step %d, where the run starts; renamed to %s", path, step, target.name)
