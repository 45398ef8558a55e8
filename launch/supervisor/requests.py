"""Signals that a supervisor got, each of which is for every rank, and lines about what happens."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType

from launch.process.stop import SIGNALS

POLL_SECONDS = 0.05


class Requests(list[int]):
    """Signals in the order in which they came.

    SLURM or a terminal may signal several nodes' supervisors; that is one request. So a signal counts as often as it
    came to one of them.

    Args:
        tell: is called with one line about each new request.
    """

    def __init__(self, tell: Callable[[str], None] = lambda line: None) -> None:
        super().__init__()
        self._tell = tell
        self._counts: Counter[tuple[str, int]] = Counter()

    def listen(self) -> None:
        """Collects this process' signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def add(self, number: int, source: str = "") -> None:
        """Takes note of a signal that came to `source`, a node; without one to this process."""
        self._counts[source, number] += 1
        if self._counts[source, number] > self.count(number):
            self.append(number)
            what = "killing all ranks" if self.shall_kill else "forwarding it to every rank"
            where = f" on {source}" if source else ""
            self._tell(f"got {signal.Signals(number).name}{where}; {what}")

    @property
    def shall_kill(self) -> bool:
        """Whether nobody wants to wait for a checkpoint any more."""
        return self.count(signal.SIGINT) > 1

    def wait(self, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Waits; whether a request came or was there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self:
            meanwhile()
            time.sleep(POLL_SECONDS)
        return bool(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.add(number)


def say(message: str) -> None:
    """Prints one line about an event."""
    write_line(1, f"launch.run: {message}")


def write_line(descriptor: int, line: str) -> None:
    """Not by print(): this is also called where a signal interrupted one, and nobody may be reading any more."""
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{line}\n".encode())
