"""Helpers that start runs under launchers or `launch.run`, find their ranks, and wait for their progress."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from launch.process.rank_status import is_alive

TIMEOUT_SECONDS = 180.0  # enough for two slow, shared cores


def supervisor_command(
    launcher: str, num_ranks: int, config: Path, *overrides: str, restarts: int | None = None
) -> list[str]:
    """Returns the command line of `launch.run`."""
    options = ["--launcher", launcher, "--num-ranks", str(num_ranks)]
    if restarts is not None:
        options += ["--max-restarts", str(restarts)]
    return [sys.executable, "-m", "launch.run", str(config), *overrides, *options]


def wait_until(condition: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None) -> None:
    """Waits until a condition holds; fails if the process ends before."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended before {what}: {process.communicate()}")
        assert time.monotonic() < end, f"timed out waiting for {what}"
        time.sleep(0.05)


def wait_for_ranks(
    process: subprocess.Popen[str], num_ranks: int, other_than: Mapping[int, psutil.Process] | None = None
) -> dict[int, psutil.Process]:
    """Waits until all ranks run under a launcher or supervisor. Returns rank -> process."""
    old = set(other_than.values()) if other_than else set()
    found: dict[int, psutil.Process] = {}

    def has_found_all() -> bool:
        found.clear()
        for child in psutil.Process(process.pid).children(recursive=True):
            rank = _rank(child)
            if rank is not None and child not in old:
                found[rank] = child
        return len(found) == num_ranks

    wait_until(has_found_all, f"{num_ranks} ranks", process)
    return found


def wait_for_steps(process: subprocess.Popen[str] | None, run_folder: Path, step: int) -> None:
    """Waits until a step has been recorded."""
    metrics = run_folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step, f"step {step}", process)


def parent_of(ranks: Mapping[int, psutil.Process]) -> psutil.Process:
    """Returns the process that started the ranks: torchrun's agent, or DeepSpeed's launch.py."""
    (parent,) = {rank.parent() for rank in ranks.values()}
    assert parent is not None
    return parent


def wait_for_end(processes: Iterable[psutil.Process], seconds: float = 60) -> float:
    """Waits until all processes have ended. Returns the seconds that it took."""
    begin = time.monotonic()
    processes = list(processes)
    while any(map(is_alive, processes)):
        assert time.monotonic() < begin + seconds, f"still running: {processes}"
        time.sleep(0.05)
    return time.monotonic() - begin


def _rank(process: psutil.Process) -> int | None:
    """Returns the rank of a process that runs train.py itself; launchers have it only among their arguments."""
    try:
        if not any(Path(word).name == "train.py" for word in process.cmdline()[1:3]):
            return None
        return int(process.environ().get("RANK", "0"))
    except (psutil.Error, OSError):
        return None
