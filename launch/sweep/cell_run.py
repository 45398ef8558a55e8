"""Runs one cell: starts train.py, stops it when it diverges, and retries once if it fails."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import IO

from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED
from launch.supervisor.attempt import Attempt, Launch
from launch.sweep.cells import Cell, cell_overrides
from launch.sweep.divergence import LossTail, divergence_step, nonfinite_step
from launch.sweep.lock import cell_locked
from launch.sweep.outcome import (
    cell_folder,
    clear_failure,
    is_finished,
    log_file,
    mark_diverged,
    mark_failed,
    state_of,
)
from launch.sweep.spec import Divergence, Sweep

POLL_SECONDS = 0.5
NUM_TRIES = 2


class Signals(list[int]):
    """Signals that this process received, in order; each is forwarded to every process that it started."""

    def listen(self) -> None:
        """Collects signals from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.append(number)


class Watch(threading.Thread):
    """Asks a run to stop once it has diverged, or once the sweep that started this process is gone.

    Attributes:
        diverged_at: The step at which the run diverged, or None.
    """

    def __init__(self, folder: Path, rule: Divergence, requests: list[int], parent: int | None) -> None:
        super().__init__(daemon=True)
        self.diverged_at: int | None = None
        self._losses = LossTail(folder)
        self._rule = rule
        self._requests = requests
        self._parent = parent
        self._over = threading.Event()

    def run(self) -> None:
        """Checks every POLL_SECONDS until there is a request."""
        while not self._over.wait(POLL_SECONDS) and not self._requests:
            self.check()
            if self.diverged_at is not None or self._parent not in (None, os.getppid()):
                self._requests.append(signal.SIGTERM)

    def check(self) -> None:
        """Checks the losses recorded so far."""
        self.diverged_at = divergence_step(self._losses.read(), self._rule)

    def end(self) -> None:
        """Stops the thread and checks a last time."""
        self._over.set()
        self.join()
        self.check()


def run_cell(sweep: Sweep, cell: Cell, parent: int | None = None) -> int:
    """Runs a cell to its end, resuming from its latest checkpoint.

    Args:
        parent: The process id of the sweep that waits for this process; the cell stops when the sweep has ended.

    Returns:
        0 finished or diverged, 75 stopped on request after a checkpoint, 1 failed.
    """
    requests = Signals()
    requests.listen()
    log_file(sweep, cell).parent.mkdir(parents=True, exist_ok=True)
    with cell_locked(sweep, cell, requests), log_file(sweep, cell).open("ab") as output:
        if requests:
            return EXIT_STOPPED
        if state_of(sweep, cell) in ("finished", "diverged"):
            return EXIT_DONE
        clear_failure(sweep, cell)
        for number in range(1, NUM_TRIES + 1):
            exit_code, reason = _try(sweep, cell, requests, parent, output)
            if exit_code != EXIT_FAILURE or requests:
                return exit_code
            output.write(f"launch.sweep: try {number} of {NUM_TRIES} failed: {reason}\n".encode())
        mark_failed(sweep, cell, reason)
    return EXIT_FAILURE


def launch_of(sweep: Sweep, arguments: list[str]) -> Launch:
    """Returns how a run of this sweep is started. One rank needs no launcher, and starts faster without."""
    launcher = "python" if sweep.ranks == 1 else sweep.launcher
    return Launch(launcher, sweep.ranks, (sweep.base, *arguments))


def _try(sweep: Sweep, cell: Cell, requests: Signals, parent: int | None, output: IO[bytes]) -> tuple[int, str]:
    """Starts the run once; returns the exit code and a one-line reason if it failed."""
    folder = cell_folder(sweep, cell)
    attempt = Attempt(launch_of(sweep, cell_overrides(sweep, cell)), lambda message: None, output)
    watch = Watch(folder, sweep.divergence, requests, parent)
    watch.start()
    try:
        attempt.wait(requests)
    finally:
        attempt.kill()
        report = attempt.close()
        watch.end()
    reason = report.failure()
    diverged_at = nonfinite_step(reason) or watch.diverged_at
    if diverged_at is not None and folder.exists():
        mark_diverged(sweep, cell, diverged_at)
        return EXIT_DONE, ""
    if is_finished(sweep, cell):
        return EXIT_DONE, ""
    return (EXIT_STOPPED, "") if requests else (EXIT_FAILURE, reason)
