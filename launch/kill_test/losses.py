"""Compares the losses of two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Losses = dict[int, dict[str, float]]  # step -> name -> value


def losses(records: Sequence[Mapping[str, Any]]) -> Losses:
    """Returns the training and validation losses of every step."""
    return {
        record["step"]: {key: value for key, value in record.items() if key == "loss" or key.startswith("val_loss")}
        for record in records
    }


def differences(expected: Losses, found: Losses, tolerance: float) -> list[str]:
    """Returns one line for the first step whose losses differ; an empty list if all agree."""
    for step, values in found.items():
        reference = expected.get(step, {})
        agree = values.keys() == reference.keys() and all(
            # None stands for a non-finite value.
            values[key] == reference[key]
            or (
                None not in (values[key], reference[key])
                and math.isclose(values[key], reference[key], rel_tol=tolerance)
            )
            for key in values
        )
        if not agree:
            return [f"step {step}: the losses are {values}, but {reference} without kills"]
    return []
