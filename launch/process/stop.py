"""Requests to stop: signals, the time limit and a lost launcher set a flag; the training loop reads it at each step."""

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

from launch.errors import EXIT_FAILURE, EXIT_STOPPED
from launch.process.lifeline import RankOutcome, is_alive, rank_text, report_outcome

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LOOK_SECONDS = 1.0  # between two looks at the guardians
LOST_SECONDS = 60.0  # for a checkpoint after the launcher is gone


class StopRequest:
    """Whether this rank was asked to stop.

    A thread takes the signals, since the main thread may be stuck in a collective. Launchers signal ranks at different
    times, so nothing collective happens here.

    Args:
        max_seconds: ask by itself when the process is this old (under `launch.run`, when the supervisor is, so that
            restarts do not prolong a job); None: never.
        guardians: see `lifeline.find_guardians`; without one of them the rank saves a checkpoint and stops.

    Attributes:
        is_orphan: whether one of them has ended.
    """

    def __init__(self, max_seconds: float | None, guardians: Sequence[psutil.Process] = ()) -> None:
        start_time = min(process.create_time() for process in (psutil.Process(), *guardians[-1:]))
        self._deadline = None if max_seconds is None else start_time + max_seconds
        self._guardians = list(guardians)
        self._signals: list[int] = []
        self.is_orphan = False
        self._is_training = False

    def listen(self) -> None:
        """Handles signals and watches the guardians from now on. For the main thread, once in a process.

        Before training begins there is nothing to save: a signal ends the process at once.
        """
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, _leave_it_to_the_thread)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=self._listen, args=(receiver, sender), name="StopRequest", daemon=True).start()

    def begin_training(self) -> None:
        """From now on a request waits for the end of a step and a checkpoint."""
        self._is_training = True

    @property
    def is_set(self) -> bool:
        is_late = self._deadline is not None and time.time() > self._deadline
        return bool(self._signals) or self.is_orphan or is_late

    def _listen(self, receiver: socket.socket, sender: socket.socket) -> None:
        """The thread; it keeps both ends of the socket pair open."""
        while True:
            readable, _, _ = select.select([receiver], [], [], LOOK_SECONDS)
            for number in receiver.recv(64) if readable else b"":
                if number in SIGNALS:
                    self._take(number)
            if not self.is_orphan:
                lost = next((process for process in self._guardians if not is_alive(process)), None)
                if lost is not None:
                    self._leave_after_loss(lost)

    def _take(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self._is_training:
            _end(RankOutcome(EXIT_STOPPED, f"stopped by {name} before the first step; there is nothing to save"))
        if number == signal.SIGINT and signal.SIGINT in self._signals:
            _end(RankOutcome(EXIT_FAILURE, "interrupted; the run can go on from its last checkpoint"))
        if not self._signals:
            log.info("%s: stopping after a checkpoint", name)
        self._signals.append(number)

    def _leave_after_loss(self, lost: psutil.Process) -> None:
        self.is_orphan = True
        message = f"process {lost.pid}, which this rank was started by, has ended"
        if not self._is_training:
            _end(RankOutcome(EXIT_FAILURE, message, is_orphan=True))
        # Other ranks may be gone as well; then no step ends any more.
        outcome = RankOutcome(EXIT_FAILURE, f"{message}, and no checkpoint could be saved", is_orphan=True)
        timer = threading.Timer(LOST_SECONDS, _end, (outcome,))
        timer.daemon = True
        timer.start()
        log.warning("%s: stopping after a checkpoint", message)


def _end(outcome: RankOutcome) -> NoReturn:
    """Ends the process at once, from any thread."""
    report_outcome(outcome)
    if rank_text(os.environ) == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"{outcome.reason}\n".encode())
    os._exit(outcome.code)


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Python writes a signal's number to the wakeup descriptor only where a handler is set."""


def _forget_signals() -> None:
    """In a forked child: signals to it are no business of this rank."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
