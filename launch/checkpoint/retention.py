"""Which checkpoints stay: pruning, cleaning up after killed saves, and setting aside an abandoned branch."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from configs.schema import CheckpointConfig
from launch.run_folder.checkpoints import ASIDE_SUFFIX, PARTIAL_SUFFIX, list_checkpoints

log = logging.getLogger(__name__)


def prune_checkpoints(checkpoints: Path, config: CheckpointConfig) -> None:
    """Deletes all but the newest `keep_last` checkpoints and the multiples of `keep_every`. For rank 0.

    No checkpoint is newer than the one just saved: those were set aside at the start. A folder that cannot be deleted
    (one that is being read on a network disk, say) is only reported.
    """
    for step, path in list_checkpoints(checkpoints)[: -config.keep_last]:
        if config.keep_every is None or step % config.keep_every:
            try:
                delete_checkpoint(path)
            except OSError as error:
                log.warning("the old checkpoint %s could not be deleted: %s", path, error)


def delete_checkpoint(checkpoint: Path) -> None:
    """Renames first, so that a kill while deleting never leaves half a checkpoint under its name."""
    doomed = checkpoint.with_name(checkpoint.name + ".old" + PARTIAL_SUFFIX)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def clean_leftovers(checkpoints: Path) -> None:
    """Deletes what killed saves left behind. For rank 0, before the first save."""
    for path in checkpoints.glob(f"*{PARTIAL_SUFFIX}"):
        log.info("removing %s, left by a save that did not finish", path)
        shutil.rmtree(path, ignore_errors=True)


def set_newer_aside(checkpoints: Path, step: int) -> None:
    """Renames checkpoints beyond the step that the run starts from: damaged ones, or of a branch given up. For rank 0.

    Otherwise pruning would keep them instead of the run's own, and the next start would take them up.
    """
    for newer, path in list_checkpoints(checkpoints):
        if newer > step:
            aside = path.with_name(path.name + ASIDE_SUFFIX)
            number = 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}{ASIDE_SUFFIX}_{number}")
            path.rename(aside)
            log.warning("%s is beyond the start at step %d; it is now %s", path, step, aside.name)
