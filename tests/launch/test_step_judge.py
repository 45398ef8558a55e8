"""The judge of steps against statistics worked out by hand and by NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import TrainConfig
from launch.engine.anomalies import Fault, StepJudge, spike_limit

FIGURES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40)


def judge(**spike: Any) -> StepJudge:
    return StepJudge(TrainConfig.model_validate({"steps": 1, "global_batch_tokens": 1, "spike": spike}))


@given(FIGURES, st.floats(0.1, 10))
def test_the_limit_is_the_mean_and_so_many_deviations(past: list[float], sigma: float) -> None:
    limit = spike_limit(past, sigma)
    mean, deviation = np.mean(past), max(np.std(past), 1e-3 * abs(np.mean(past)))
    assert limit == pytest.approx(mean + sigma * deviation, rel=1e-9, abs=1e-6)


def test_a_spike_is_told_once_half_of_the_window_is_there() -> None:
    early, late = (
        judge(window=8, threshold_sigma=3.0, action="skip"),
        judge(window=8, threshold_sigma=3.0, action="skip"),
    )
    for step in range(3):
        assert early.judge(2.0 + 0.1 * (step % 2), 1.0) is None
    assert early.judge(50.0, 1.0) is None
    for step in range(4):
        assert late.judge(2.0 + 0.1 * (step % 2), 1.0) is None
    fault = late.judge(50.0, 1.0)
    assert fault is not None and fault.action == "skip"
    assert fault.spike == "loss 50 is above 2.2 (mean of the last 4 steps and 3 standard deviations)"


def test_a_second_spike_is_not_hidden_by_the_first() -> None:
    steps = judge(window=16, threshold_sigma=6.0, action="rollback")
    for step in range(16):
        assert steps.judge(2.0 + 0.01 * (step % 2), 1.0 + 0.01 * (step % 2)) is None
    for _ in range(2):
        fault = steps.judge(2.0, 30.0)
        assert fault is not None and fault.action == "rollback"
        assert fault.spike is not None and fault.spike.startswith("gradient norm 30 is above")


def test_a_level_that_stays_becomes_the_usual_one() -> None:
    steps = judge(window=16, threshold_sigma=6.0, action="skip")
    faults = [steps.judge(2.0 if step < 20 else 3.0, 1.0) is not None for step in range(100)]
    assert not any(faults[:20])
    assert 1 <= sum(faults) <= 16
    assert not any(faults[-50:])


def test_warnings_in_a_row_are_one() -> None:
    steps = judge(window=4, threshold_sigma=3.0, action="warn")
    losses = [2.0, 2.1, 2.0, 2.1, 90.0, 90.0, 2.0]
    faults = [steps.judge(loss, 1.0) is not None for loss in losses]
    assert faults == [False] * 4 + [True, False, False]


def test_falling_losses_and_other_steps_are_no_spikes() -> None:
    steps = judge(window=32, threshold_sigma=6.0)
    assert all(steps.judge(10.0 * 0.9**step, 5.0 * 0.95**step) is None for step in range(200))


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_what_is_not_finite_is_at_fault_and_leaves_no_trace(loss: float, norm: float, action: Any) -> None:
    settings = {"steps": 1, "global_batch_tokens": 1, "on_nonfinite": action}
    steps = StepJudge(TrainConfig.model_validate(settings))
    assert steps.may_skip == (action == "skip")
    before = steps.state()
    assert steps.judge(loss, norm) == Fault(action)
    assert steps.state() == before


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.integers(0, 29))
def test_a_judge_that_was_saved_and_loaded_goes_on_alike(figures: list[float], cut: int) -> None:
    whole, first, second = (judge(window=8, threshold_sigma=2.0, action="skip") for _ in range(3))
    expected = [whole.judge(figure, 1.0) for figure in figures]
    found = [first.judge(figure, 1.0) for figure in figures[:cut]]
    second.load_state(first.state())
    assert found + [second.judge(figure, 1.0) for figure in figures[cut:]] == expected


def test_without_spikes_only_finiteness_counts() -> None:
    steps = judge(threshold_sigma=None, action="skip")
    assert [steps.judge(loss, 1.0) for loss in (1.0, 1.0, 1e9)] == [None] * 3
    assert not steps.may_skip
