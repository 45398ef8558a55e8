"""What a rank reports to its supervisor, and which parent processes it watches.

`launch.run` (the supervisor) passes two variables to its ranks: its process id, and a folder in which every rank writes
its process id when it starts and its outcome before it ends. The supervisor relies on these files, since launchers map
exit codes and signals in their own ways. A rank in turn watches its launcher and supervisor, and stops without them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from data.files import write_file
from launch.errors import RunError

SUPERVISOR = "STEADYHEAD_SUPERVISOR"  # process id
RANKS_FOLDER = "STEADYHEAD_RANKS"
_DEEPSPEED_RUNNERS = ("deepspeed", "deepspeed.pt", "ds", "runner.py")


@dataclass(frozen=True)
class RankOutcome:
    """How a rank ended.

    Attributes:
        code: Its exit code.
        reason: Why it ended, in one line; may be empty.
        is_orphan: Whether it stopped because its launcher or supervisor had ended.
    """

    code: int
    reason: str = ""
    is_orphan: bool = False


def register_rank(environ: Mapping[str, str]) -> None:
    """Reports this rank's process id to the supervisor, if there is one."""
    if RANKS_FOLDER in environ:
        write_file(Path(environ[RANKS_FOLDER]) / f"{_rank(environ)}.pid", str(os.getpid()).encode())


def report_outcome(outcome: RankOutcome, environ: Mapping[str, str] | None = None) -> None:
    """Reports to the supervisor, if there is one, how this rank ends. Never raises: the supervisor may have ended."""
    environ = os.environ if environ is None else environ
    if RANKS_FOLDER in environ:
        content = json.dumps({**asdict(outcome), "reason": " ".join(outcome.reason.split())})
        with contextlib.suppress(OSError):
            write_file(Path(environ[RANKS_FOLDER]) / f"{_rank(environ)}.outcome", content.encode())


def read_registered_ranks(folder: Path) -> dict[int, int]:
    """Returns rank -> process id of the ranks that have started so far."""
    return {int(path.stem): int(path.read_text()) for path in folder.glob("*.pid")}


def read_outcomes(folder: Path) -> dict[int, RankOutcome]:
    """Returns rank -> outcome of the ranks that have reported one so far."""
    return {int(path.stem): RankOutcome(**json.loads(path.read_text())) for path in folder.glob("*.outcome")}


def find_watched_parents(environ: Mapping[str, str]) -> list[psutil.Process]:
    """Returns the parents without which this rank must not continue, nearest first; none without a launcher.

    Under `launch.run`, these are all ancestors up to it. Otherwise torchrun's agent, or DeepSpeed's `launch.py` and the
    `deepspeed` command that started it on the same machine. A shell, srun or mpirun is not watched.

    Raises:
        RunError: The supervisor has already ended.
    """
    ancestors = psutil.Process().parents()
    if SUPERVISOR in environ:
        supervisors = [index for index, process in enumerate(ancestors) if str(process.pid) == environ[SUPERVISOR]]
        if not supervisors:
            raise RunError(f"the supervisor or a launcher ({SUPERVISOR}={environ[SUPERVISOR]}) ended during the start")
        return ancestors[: supervisors[0] + 1]
    if "TORCHELASTIC_RUN_ID" in environ:
        return ancestors[:1]
    if "CROSS_SIZE" in environ:  # DeepSpeed's launch.py sets it
        return ancestors[:1] + [process for process in ancestors[1:2] if _is_deepspeed_runner(process)]
    return []


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs or is suspended; a zombie has ended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _is_deepspeed_runner(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:4]
    except psutil.Error:
        return False
    return "deepspeed.launcher.runner" in words or any(Path(word).name in _DEEPSPEED_RUNNERS for word in words)


def rank_text(environ: Mapping[str, str]) -> str:
    """Returns this process's rank as the launcher set it, unchecked; "0" without a launcher."""
    return environ.get("RANK", environ.get("SLURM_PROCID", "0"))


def _rank(environ: Mapping[str, str]) -> int:
    return int(rank_text(environ))
