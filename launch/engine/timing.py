"""Elapsed time on the device, measured without making the host wait."""

from __future__ import annotations

import time

import torch


class Interval:
    """The time between its creation and `stop()`; on a GPU, measured by events in the stream."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()
        self._start = self._end = time.perf_counter()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()
        self._end = time.perf_counter()

    def is_over(self) -> bool:
        """Whether the device has reached the end of the interval."""
        return self._events is None or self._events[1].query()

    def seconds(self) -> float:
        """The length of the interval; on a GPU, waits for its end."""
        if self._events is None:
            return self._end - self._start
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1000


class Stopwatch:
    """The total length of several intervals."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._intervals: list[Interval] = []

    def start(self) -> None:
        self._intervals.append(Interval(self._device))

    def stop(self) -> None:
        self._intervals[-1].stop()

    def take(self) -> float:
        """Returns the seconds of all intervals that are over and not yet counted; never waits."""
        over = [interval for interval in self._intervals if interval.is_over()]
        self._intervals = [interval for interval in self._intervals if interval not in over]
        return sum(interval.seconds() for interval in over)
