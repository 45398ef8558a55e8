"""The stopwatch of the forward passes."""

from __future__ import annotations

import torch

from launch.engine.timing import Stopwatch


def test_a_stopwatch_adds_intervals_and_starts_again() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(3):
        watch.start()
        watch.stop()
    assert 0 < watch.take() < 1
    assert watch.take() == 0
