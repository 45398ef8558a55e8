"""The anomaly policy against statistics worked out by hand and by NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import TrainConfig
from launch.engine.anomalies import Anomaly, AnomalyPolicy, spike_limit

FIGURES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40)


def policy(**spike: Any) -> AnomalyPolicy:
    return AnomalyPolicy(TrainConfig.model_validate({"steps": 1, "global_batch_tokens": 1, "spike": spike}))


@given(FIGURES, st.floats(0.1, 10))
def test_the_limit_is_the_mean_and_so_many_deviations(past: list[float], sigma: float) -> None:
    limit = spike_limit(past, sigma)
    mean, deviation = np.mean(past), max(np.std(past), 1e-3 * abs(np.mean(past)))
    assert limit == pytest.approx(mean + sigma * deviation, rel=1e-9, abs=1e-6)


def test_a_spike_is_told_once_half_of_the_window_is_there() -> None:
    early, late = (
        policy(window=8, threshold_sigma=3.0, action="skip"),
        policy(window=8, threshold_sigma=3.0, action="skip"),
    )
    for step in range(3):
        assert early.check(2.0 + 0.1 * (step % 2), 1.0) is None
    assert early.check(50.0, 1.0) is None
    for step in range(4):
        assert late.check(2.0 + 0.1 * (step % 2), 1.0) is None
    anomaly = late.check(50.0, 1.0)
    assert anomaly is not None and anomaly.action == "skip"
    assert anomaly.spike == "loss 50 is above 2.2 (mean of the last 4 steps plus 3 standard deviations)"


def test_a_second_spike_is_not_hidden_by_the_first() -> None:
    steps = policy(window=16, threshold_sigma=6.0, action="rollback")
    for step in range(16):
        assert steps.check(2.0 + 0.01 * (step % 2), 1.0 + 0.01 * (step % 2)) is None
    for _ in range(2):
        anomaly = steps.check(2.0, 30.0)
        assert anomaly is not None and anomaly.action == "rollback"
        assert anomaly.spike is not None and anomaly.spike.startswith("gradient norm 30 is above")


def test_a_level_that_stays_becomes_the_usual_one() -> None:
    steps = policy(window=16, threshold_sigma=6.0, action="skip")
    anomalys = [steps.check(2.0 if step < 20 else 3.0, 1.0) is not None for step in range(100)]
    assert not any(anomalys[:20])
    assert 1 <= sum(anomalys) <= 16
    assert not any(anomalys[-50:])


def test_warnings_in_a_row_are_one() -> None:
    steps = policy(window=4, threshold_sigma=3.0, action="warn")
    losses = [2.0, 2.1, 2.0, 2.1, 90.0, 90.0, 2.0]
    anomalys = [steps.check(loss, 1.0) is not None for loss in losses]
    assert anomalys == [False] * 4 + [True, False, False]


def test_falling_losses_and_other_steps_are_no_spikes() -> None:
    steps = policy(window=32, threshold_sigma=6.0)
    assert all(steps.check(10.0 * 0.9**step, 5.0 * 0.95**step) is None for step in range(200))


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_what_is_not_finite_is_at_anomaly_and_leaves_no_trace(loss: float, norm: float, action: Any) -> None:
    settings = {"steps": 1, "global_batch_tokens": 1, "on_nonfinite": action}
    steps = AnomalyPolicy(TrainConfig.model_validate(settings))
    assert steps.may_skip == (action == "skip")
    before = steps.state()
    assert steps.check(loss, norm) == Anomaly(action)
    assert steps.state() == before


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.integers(0, 29))
def test_a_restored_policy_continues_alike(figures: list[float], cut: int) -> None:
    whole, first, second = (policy(window=8, threshold_sigma=2.0, action="skip") for _ in range(3))
    expected = [whole.check(figure, 1.0) for figure in figures]
    found = [first.check(figure, 1.0) for figure in figures[:cut]]
    second.load_state(first.state())
    assert found + [second.check(figure, 1.0) for figure in figures[cut:]] == expected


def test_without_spikes_only_finiteness_counts() -> None:
    steps = policy(threshold_sigma=None, action="skip")
    assert [steps.check(loss, 1.0) for loss in (1.0, 1.0, 1e9)] == [None] * 3
    assert not steps.may_skip
