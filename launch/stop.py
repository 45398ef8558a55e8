"""Requests to stop: signals and the time limit set a flag; the training loop reads it at each step."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType

import psutil

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Whether this rank was asked to stop.

    Args:
        max_seconds: ask by itself when the process is this old; None: never.
    """

    def __init__(self, max_seconds: float | None) -> None:
        self._deadline = None if max_seconds is None else psutil.Process().create_time() + max_seconds
        self._signalled = False

    def listen(self) -> None:
        """Handles signals from now on. Launchers signal ranks at different times, so nothing collective happens here.

        A second SIGINT interrupts at once.
        """
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def is_set(self) -> bool:
        return self._signalled or (self._deadline is not None and time.time() > self._deadline)
