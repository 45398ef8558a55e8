"""What a rank and those who started it know of each other.

`launch.run` (the supervisor) gives its ranks two variables: its own process id, and a folder in which every rank writes
its process id when it starts and its outcome before it ends. Launchers map exit codes and signals in their own ways,
so this is what the supervisor goes by. A rank in turn watches its guardians: the launcher and the supervisor.
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
        code: its exit code.
        reason: one line that says why; empty where the code says it all.
        is_orphan: it stopped since its launcher or supervisor was gone.
    """

    code: int
    reason: str = ""
    is_orphan: bool = False


def announce_rank(environ: Mapping[str, str]) -> None:
    """Tells the supervisor, if there is one, which process is which rank."""
    if RANKS_FOLDER in environ:
        write_file(Path(environ[RANKS_FOLDER]) / f"{_rank(environ)}.pid", str(os.getpid()).encode())


def report_outcome(outcome: RankOutcome, environ: Mapping[str, str] | None = None) -> None:
    """Tells the supervisor, if there is one, how this rank ends. It never raises: the supervisor may be gone."""
    environ = os.environ if environ is None else environ
    if RANKS_FOLDER in environ:
        content = json.dumps({**asdict(outcome), "reason": " ".join(outcome.reason.split())})
        with contextlib.suppress(OSError):
            write_file(Path(environ[RANKS_FOLDER]) / f"{_rank(environ)}.outcome", content.encode())


def read_announcements(folder: Path) -> dict[int, int]:
    """Rank -> process id of the ranks that have started so far."""
    return {int(path.stem): int(path.read_text()) for path in folder.glob("*.pid")}


def read_outcomes(folder: Path) -> dict[int, RankOutcome]:
    """Rank -> outcome of the ranks that have reported one so far."""
    return {int(path.stem): RankOutcome(**json.loads(path.read_text())) for path in folder.glob("*.outcome")}


def find_guardians(environ: Mapping[str, str]) -> list[psutil.Process]:
    """The processes without which this rank must not go on, nearest first; none outside of a launcher.

    Under `launch.run`, all ancestors up to it. Otherwise torchrun's agent, or DeepSpeed's `launch.py` and the
    `deepspeed` command that started it on the same machine. (A shell, srun or mpirun is no guardian.)

    Raises:
        RunError: the supervisor has ended already.
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
    """Whether a process runs or is stopped; a zombie has ended."""
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
    """This process' rank as its launcher put it, before anything is checked; "0" without one."""
    return environ.get("RANK", environ.get("SLURM_PROCID", "0"))


def _rank(environ: Mapping[str, str]) -> int:
    return int(rank_text(environ))
