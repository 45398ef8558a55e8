"""The meaning of `run.resume`. All code that depends on the key calls these functions instead of reading its value.

    value   start                               folder that holds a run     finished run      several starts
    auto    newest undamaged checkpoint, or 0   is continued                nothing to do     yes
    never   step 0                              is refused                  is refused        no
    PATH    that checkpoint, or fail            is continued from PATH      trains again      no

A supervisor that restarts a run overrides the key with `auto` as soon as the run has saved a checkpoint of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

AUTO, NEVER = "auto", "never"
_AUTO_OVERRIDE = f"run.resume={AUTO}"


def named_checkpoint(resume: str) -> Path | None:
    """Returns the checkpoint or run folder that the key names; None for `auto` and `never`."""
    return None if resume in (AUTO, NEVER) else Path(resume)


def resumes_newest(resume: str) -> bool:
    """Whether a run continues from the newest undamaged checkpoint in its own folder, if there is one."""
    return resume == AUTO


def refuses_existing_run(resume: str) -> bool:
    """Whether the run's folder must not hold a run yet."""
    return resume == NEVER


def stays_finished(resume: str) -> bool:
    """Whether a run that has reached its last step has nothing to do. A named checkpoint makes it train again."""
    return resume == AUTO


def allows_repeated_starts(resume: str) -> bool:
    """Whether the same command line can be started again after a stop, as a requeued SLURM job does."""
    return resume == AUTO


def allows_init_from(resume: str) -> bool:
    """Whether `run.init_from` may be set as well, which is not the case if the key names a checkpoint."""
    return named_checkpoint(resume) is None


def restart_arguments(arguments: Sequence[str], has_saved: bool) -> tuple[str, ...]:
    """Returns the arguments of `train.py` for a restart by a supervisor.

    Args:
        arguments: The configuration file and `key=value` arguments of the previous start.
        has_saved: Whether a checkpoint was saved since the supervisor started. Until then, a restart repeats the first
            start, whatever the key says.
    """
    if not has_saved or _AUTO_OVERRIDE in arguments:
        return tuple(arguments)
    return (*arguments, _AUTO_OVERRIDE)
