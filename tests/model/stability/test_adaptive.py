"""The adaptive controller: its update rule, its automatic target, and its state."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.stability.adaptive import NUM_TARGET_MEASUREMENTS, AdaptiveController, adapted_alpha

positive = st.floats(1e-6, 1e6)


@given(st.floats(0.01, 1), positive, positive, st.floats(0.1, 1))
def test_alpha_moves_towards_the_target_and_stays_in_range(
    alpha: float, drift: float, target: float, exponent: float
) -> None:
    new = adapted_alpha(alpha, drift, target, exponent, min_alpha=0.01)
    assert 0.01 <= new <= 1
    assert (new - alpha) * (target - drift) >= 0
    if 0.01 < new < 1:
        assert math.log(new / alpha) == pytest.approx(exponent * math.log(target / drift), abs=1e-9)


@pytest.mark.parametrize("drift", [0.0, math.nan, math.inf])
def test_a_zero_or_non_finite_drift_leaves_alpha_unchanged(drift: float) -> None:
    assert adapted_alpha(0.1, drift, 1.0, 0.5, 0.01) == 0.1


def test_the_target_is_the_median_of_the_first_measurements() -> None:
    controller = AdaptiveController(2, alpha=0.1, target=None, exponent=1.0, min_alpha=0.01)
    for measurement in range(NUM_TARGET_MEASUREMENTS):
        assert controller.target is None
        controller.observe([1.0 + measurement, 101.0 + measurement])
    assert controller.target == pytest.approx((10.0 + 101.0) / 2)
    assert controller.alphas == [0.1, 0.1]
    controller.observe([2 * 55.5, 55.5 / 3])
    assert controller.alphas == pytest.approx([0.05, 0.3])


def test_a_drift_proportional_to_alpha_converges_to_the_target() -> None:
    controller = AdaptiveController(2, alpha=0.1, target=0.02, exponent=0.5, min_alpha=1e-3)
    gains = [1.5, 0.4]
    for _ in range(30):
        controller.observe([gain * alpha for gain, alpha in zip(gains, controller.alphas, strict=True)])
    assert [gain * alpha for gain, alpha in zip(gains, controller.alphas, strict=True)] == pytest.approx([0.02] * 2)


def test_the_automatic_target_ignores_drifts_that_are_zero_or_non_finite() -> None:
    controller = AdaptiveController(4, alpha=0.1, target=None, exponent=1.0, min_alpha=0.01)
    for _ in range(NUM_TARGET_MEASUREMENTS):
        controller.observe([0.0, math.nan, 3.0, math.inf])
    assert controller.target == 3.0


def test_measurement_starts_again_if_no_drift_was_usable() -> None:
    controller = AdaptiveController(2, alpha=0.1, target=None, exponent=1.0, min_alpha=0.01)
    for _ in range(NUM_TARGET_MEASUREMENTS):
        controller.observe([0.0, math.nan])
    assert controller.target is None
    for _ in range(NUM_TARGET_MEASUREMENTS):
        assert controller.target is None
        controller.observe([2.0, 4.0])
    assert controller.target == 3.0


def test_a_controller_restored_before_its_target_is_known_finds_the_same_target() -> None:
    controller = AdaptiveController(1, alpha=0.1, target=None, exponent=1.0, min_alpha=0.01)
    for drift in (1.0, 2.0, 3.0):
        controller.observe([drift])
    restored = AdaptiveController(1, alpha=0.1, target=None, exponent=1.0, min_alpha=0.01)
    restored.load_state(json.loads(json.dumps(controller.state())))
    for drift in range(4, 4 + NUM_TARGET_MEASUREMENTS - 3):
        assert restored.target is None
        restored.observe([float(drift)])
    assert restored.target == (1 + NUM_TARGET_MEASUREMENTS) / 2


def test_a_measurement_of_another_number_of_layers_raises() -> None:
    controller = AdaptiveController(2, alpha=0.1, target=1.0, exponent=1.0, min_alpha=0.01)
    with pytest.raises(ValueError, match="shorter"):
        controller.observe([1.0])


def test_state_survives_json_and_a_configured_target_takes_precedence() -> None:
    controller = AdaptiveController(2, alpha=0.1, target=None, exponent=0.5, min_alpha=1e-3)
    for _ in range(NUM_TARGET_MEASUREMENTS + 3):
        controller.observe([0.03, 0.01])
    state = json.loads(json.dumps(controller.state()))
    twin = AdaptiveController(2, alpha=0.5, target=None, exponent=0.5, min_alpha=1e-3)
    twin.load_state(state)
    fixed = AdaptiveController(2, alpha=0.5, target=7.0, exponent=0.5, min_alpha=1e-3)
    fixed.load_state(state)
    for each in (controller, twin):
        each.observe([0.05, 0.02])
    assert twin.alphas == controller.alphas and twin.target == controller.target
    assert fixed.alphas == state["alphas"] and fixed.target == 7.0
