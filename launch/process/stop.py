"""Requests to stop: signals, the time limit or a lost launcher set a flag that the training loop reads at each step."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import psutil

from launch.errors import EXIT_FAILURE, EXIT_STOPPED, INTERRUPTED
from launch.process.rank_status import RankOutcome, is_alive, rank_text, report_outcome

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_SECONDS = 1.0  # between two checks of the parent processes
ORPHAN_GRACE_SECONDS = 60.0  # for a checkpoint after the launcher has ended


class StopRequest:
    """Whether this rank was asked to stop.

    A thread handles the signals, since the main thread may be stuck in a collective. Launchers signal ranks at
    different times, so there are no collectives here.

    Args:
        max_seconds: The age of the process at which it stops by itself. With watched parents the age of the outermost
            counts, so that restarts do not prolong a job. None: no limit.
        watched_parents: See `rank_status.find_watched_parents`. When one of them ends, the rank saves a checkpoint and
            stops.

    Attributes:
        is_orphan: Whether one of the watched parents has ended.
    """

    def __init__(self, max_seconds: float | None, watched_parents: Sequence[psutil.Process] = ()) -> None:
        start_time = min(process.create_time() for process in (psutil.Process(), *watched_parents[-1:]))
        self._deadline = None if max_seconds is None else start_time + max_seconds
        self._watched_parents = list(watched_parents)
        self._signals: list[int] = []
        self.is_orphan = False
        self._is_training = False

    def listen(self) -> None:
        """Starts handling signals and watching the parents. Called once per process, in the main thread.

        Before training begins there is nothing to save, and a signal ends the process at once.
        """
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, _ignore_in_main_thread)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_reset_signals)
        threading.Thread(target=self._listen, args=(receiver, sender), name="StopRequest", daemon=True).start()

    def begin_training(self) -> None:
        """From now on, a request takes effect at the end of a step, after a checkpoint."""
        self._is_training = True

    @property
    def is_set(self) -> bool:
        is_late = self._deadline is not None and time.time() > self._deadline
        return bool(self._signals) or self.is_orphan or is_late

    def _listen(self, receiver: socket.socket, sender: socket.socket) -> None:
        """Runs in the thread, and keeps both ends of the socket pair open."""
        while True:
            readable, _, _ = select.select([receiver], [], [], POLL_SECONDS)
            for number in receiver.recv(64) if readable else b"":
                if number in SIGNALS:
                    self._handle_signal(number)
            if not self.is_orphan:
                lost = next((process for process in self._watched_parents if not is_alive(process)), None)
                if lost is not None:
                    self._handle_lost_parent(lost)

    def _handle_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self._is_training:
            _exit_now(RankOutcome(EXIT_STOPPED, f"stopped by {name} before the first step; there is nothing to save"))
        if number == signal.SIGINT and signal.SIGINT in self._signals:
            _exit_now(RankOutcome(EXIT_FAILURE, INTERRUPTED))
        if not self._signals:
            log.info("%s: stopping after a checkpoint", name)
        self._signals.append(number)

    def _handle_lost_parent(self, lost: psutil.Process) -> None:
        self.is_orphan = True
        message = f"process {lost.pid}, which started this rank, has ended"
        if not self._is_training:
            _exit_now(RankOutcome(EXIT_FAILURE, message, is_orphan=True))
        # Other ranks may have ended as well, so that no step can finish any more.
        outcome = RankOutcome(EXIT_FAILURE, f"{message}, and no checkpoint could be saved", is_orphan=True)
        timer = threading.Timer(ORPHAN_GRACE_SECONDS, _exit_now, (outcome,))
        timer.daemon = True
        timer.start()
        log.warning("%s: stopping after a checkpoint", message)


def _exit_now(outcome: RankOutcome) -> NoReturn:
    """Reports the outcome and ends the process at once, from any thread."""
    report_outcome(outcome)
    if rank_text(os.environ) == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"{outcome.reason}\n".encode())
    os._exit(outcome.code)


def _ignore_in_main_thread(number: int, frame: FrameType | None) -> None:
    """Does nothing; Python writes a signal's number to the wakeup descriptor only if a handler is set."""


def _reset_signals() -> None:
    """Restores the default handlers in a forked child, whose signals are not meant for this rank."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
