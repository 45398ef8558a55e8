"""The learning rate is a pure function of the step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import OptimConfig
from launch.optim.schedule import learning_rate

SCHEDULES = st.sampled_from(["constant", "cosine", "wsd"])


def rates(optim: OptimConfig, steps: int) -> list[float]:
    return [learning_rate(step, steps, optim) for step in range(steps)]


def test_values_by_hand() -> None:
    cosine = OptimConfig(lr=1.0, warmup_steps=2, schedule="cosine", min_lr_ratio=0.0)
    assert rates(cosine, 6) == pytest.approx([0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    wsd = OptimConfig(lr=1.0, warmup_steps=1, schedule="wsd", min_lr_ratio=0.2, decay_fraction=0.4)
    assert rates(wsd, 10) == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    constant = OptimConfig(lr=2.0, warmup_steps=0, schedule="constant")
    assert rates(constant, 3) == [2.0, 2.0, 2.0]


@given(SCHEDULES, st.integers(0, 50), st.integers(1, 200), st.floats(0, 1), st.floats(1e-6, 10))
def test_rises_then_falls_within_bounds(schedule: str, warmup: int, steps: int, floor: float, peak: float) -> None:
    optim = OptimConfig.model_validate(
        {"lr": peak, "warmup_steps": min(warmup, steps), "schedule": schedule, "min_lr_ratio": floor}
    )
    values = rates(optim, steps)
    start = optim.warmup_steps
    assert values[:start] == sorted(values[:start])
    assert values[start:] == sorted(values[start:], reverse=True)
    assert all(0 < value <= peak * (1 + 1e-12) for value in values[:start])
    assert all(floor * peak * (1 - 1e-12) <= value <= peak * (1 + 1e-12) for value in values[start:])


@given(SCHEDULES, st.integers(1, 100))
def test_after_the_horizon_the_last_rate_holds(schedule: str, steps: int) -> None:
    optim = OptimConfig.model_validate({"lr": 1.0, "warmup_steps": 0, "schedule": schedule, "min_lr_ratio": 0.25})
    expected = 1.0 if schedule == "constant" else 0.25
    assert learning_rate(steps, steps, optim) == pytest.approx(expected)
    assert learning_rate(steps + 7, steps, optim) == pytest.approx(expected)
