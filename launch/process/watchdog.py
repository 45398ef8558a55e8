"""Ends a process whose run hangs, so that a supervisor can restart it, and writes where each thread was stuck."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from configs.schema import WatchdogConfig
from launch.errors import EXIT_FAILURE
from launch.process.rank_status import RankOutcome, report_outcome

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
MEDIAN_STEPS = 101
SETTLE_SECONDS = 5.0  # between detection and exit, so that all ranks write their stacks before the first one exits


class Watchdog:
    """A thread that ends the process when the run makes no progress. Used as a context manager.

    Progress is a finished step, or the beginning or end of slow work such as a checkpoint. The thread needs the
    interpreter lock, which collectives, kernels and file reads do not hold. Time counts only while this process runs: a
    suspended process (Ctrl-Z, a suspended job) does not hang.

    Args:
        settings: The limits; `min_seconds: null` switches the watchdog off.
        stacks: The file to which the stacks are appended.
        rank: This rank, for the file's header.
    """

    def __init__(self, settings: WatchdogConfig, stacks: Path, rank: int) -> None:
        self._settings = settings
        self._stacks = stacks
        self._rank = rank
        self._stopped = threading.Event()
        self._progress = 0
        self._step = 0
        self._is_slow = True  # the start, until the first step is finished
        self._last_finish: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def __enter__(self) -> Watchdog:
        if self._settings.min_seconds is not None:
            threading.Thread(target=self._watch, name="Watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()

    def step_finished(self, step: int) -> None:
        """Records a finished step."""
        now = time.monotonic()
        if self._last_finish is not None:
            self._step_seconds.append(now - self._last_finish)
            self._is_slow = False
        self._last_finish = now
        self._step = step
        self._progress += 1

    def expect_slow_start(self) -> None:
        """Allows `slow_seconds` until the second step from now, as at the start."""
        self._is_slow, self._last_finish = True, None
        self._progress += 1

    @contextlib.contextmanager
    def slow_work(self) -> Iterator[None]:
        """Allows `slow_seconds` for the work inside, e.g. a checkpoint or a validation."""
        was_slow, self._is_slow = self._is_slow, True
        self._progress += 1
        try:
            yield
        finally:
            self._is_slow = was_slow
            self._last_finish = None if self._last_finish is None else time.monotonic()
            self._progress += 1

    def limit_seconds(self) -> float:
        """Returns how long the run may currently go without progress."""
        assert self._settings.min_seconds is not None
        if self._is_slow:
            return max(self._settings.min_seconds, self._settings.slow_seconds)
        median = statistics.median(self._step_seconds.copy())
        return max(self._settings.min_seconds, self._settings.step_factor * median)

    def _watch(self) -> None:
        idle_seconds, last_progress, last_poll = 0.0, self._progress, time.monotonic()
        while not self._stopped.wait(POLL_SECONDS):
            now = time.monotonic()
            idle_seconds += min(now - last_poll, 2 * POLL_SECONDS)
            last_poll = now
            if self._progress == last_progress and idle_seconds > self.limit_seconds():
                self._exit_unless_progress(idle_seconds)
            if self._progress != last_progress:
                idle_seconds, last_progress = 0.0, self._progress

    def _exit_unless_progress(self, idle_seconds: float) -> None:
        """Reports the hang and ends the process, unless the run makes progress meanwhile.

        Reports in a thread, since the disk or the terminal may be what hangs.
        """
        last_progress = self._progress
        reason = (
            f"the run hangs: no progress for {idle_seconds:.0f} s after step {self._step} (see watchdog.*); "
            f"the stacks of all threads are in {self._stacks}"
        )
        end = time.monotonic() + SETTLE_SECONDS
        reporter = threading.Thread(target=self._report, args=(reason,), name="Watchdog report", daemon=True)
        reporter.start()
        reporter.join(SETTLE_SECONDS)
        while time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        if self._progress != last_progress or self._stopped.is_set():
            log.warning("the run continues after all; raise watchdog.min_seconds if such pauses are normal")
            return
        report_outcome(RankOutcome(EXIT_FAILURE, reason))
        os._exit(EXIT_FAILURE)

    def _report(self, reason: str) -> None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S %z")
        header = f"rank {self._rank}, host {socket.gethostname()}, process {os.getpid()}, step {self._step}, {moment}\n"
        with self._stacks.open("a", encoding="utf-8") as file:
            file.write(header)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        log.error("%s", reason)


def stacks_file(run_folder: Path, rank: int) -> Path:
    """Returns the file to which a rank's stacks are written when the run hangs."""
    return run_folder / f"stacks_rank_{rank}.txt"
