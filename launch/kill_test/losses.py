"""Comparing the losses of two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Losses = dict[int, dict[str, float]]  # step -> name -> value


def losses(records: Sequence[Mapping[str, Any]]) -> Losses:
    """Training and validation losses of every step."""
    return {
        record["step"]: {key: value for key, value in record.items() if key == "loss" or key.startswith("val_loss")}
        for record in records
    }


def differences(expected: Losses, found: Losses, tolerance: float) -> list[str]:
    """One line for the first of the found steps whose losses differ; none when all agree."""
    for step, values in found.items():
        wanted = expected.get(step, {})
        agree = values.keys() == wanted.keys() and all(
            # None stands for a figure that is not finite.
            values[key] == wanted[key]
            or (None not in (values[key], wanted[key]) and math.isclose(values[key], wanted[key], rel_tol=tolerance))
            for key in values
        )
        if not agree:
            return [f"step {step}: the losses are {values}, and without kills {wanted}"]
    return []
