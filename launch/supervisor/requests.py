"""Signals that a supervisor received and passes to every rank, and the lines that it prints."""

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
    """Signals in the order in which they arrived.

    SLURM or a terminal may signal the supervisors of several nodes at once, which is one request. A signal is therefore
    counted as often as the supervisor that received it most often did.

    Args:
        log_event: Called with one line for each new request.
    """

    def __init__(self, log_event: Callable[[str], None] = lambda line: None) -> None:
        super().__init__()
        self._log_event = log_event
        self._counts: Counter[tuple[str, int]] = Counter()

    def listen(self) -> None:
        """Installs handlers that collect this process's signals."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def add(self, number: int, source: str = "") -> None:
        """Records a signal that the node `source` received; an empty name means this process."""
        self._counts[source, number] += 1
        if self._counts[source, number] > self.count(number):
            self.append(number)
            action = "killing all ranks" if self.must_kill else "forwarding it to every rank"
            where = f" on {source}" if source else ""
            self._log_event(f"got {signal.Signals(number).name}{where}; {action}")

    @property
    def must_kill(self) -> bool:
        """Whether all ranks must be killed without waiting for a checkpoint: after a second SIGINT."""
        return self.count(signal.SIGINT) > 1

    def wait(self, seconds: float, poll: Callable[[], object] = lambda: None) -> bool:
        """Waits for a request, calling `poll` repeatedly. Returns whether there is one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self:
            poll()
            time.sleep(POLL_SECONDS)
        return bool(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.add(number)


def log_event(message: str) -> None:
    """Prints one line about an event."""
    write_line(1, f"launch.run: {message}")


def write_line(descriptor: int, line: str) -> None:
    """Writes a line. Not with print(), which must not be re-entered from a signal handler; a closed pipe is ignored."""
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{line}\n".encode())
