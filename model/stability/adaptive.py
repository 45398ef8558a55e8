"""The policy `adaptive`, a controller of every layer's query/key learning rate. It is this project's own method.

How far a step moves the logits depends on the learning rate, and on weights and inputs that change during training.
The controller measures this drift, and adjusts each layer's alpha to keep it at a target:

    alpha_l <- clip(alpha_l (target / drift_l)^exponent, min_alpha, 1)

The drift is the change of the logits for *fixed* attention inputs, caused by the query/key weights alone
(`launch.attention_control.probe` measures it). It is per step at the peak learning rate: each step is weighted by its
learning rate relative to the peak, so that the controller does not undo the schedule's decay. If no target is
configured, it becomes the median over all layers of the first ten measurements after the warm-up; until then alpha
keeps its initial value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

NUM_TARGET_MEASUREMENTS = 10


def adapted_alpha(alpha: float, drift: float, target: float, exponent: float, min_alpha: float) -> float:
    """Returns a layer's next alpha, between min_alpha and 1; it is unchanged if the drift is zero or non-finite."""
    if drift <= 0 or not math.isfinite(drift):
        return alpha
    return min(max(alpha * (target / drift) ** exponent, min_alpha), 1.0)


class AdaptiveController:
    """Adjusts the alpha of every layer.

    Attributes:
        alphas: The learning rate of each layer's query/key matrices, relative to the base learning rate.
        target: The drift to maintain; None until there are enough measurements.
    """

    def __init__(self, num_layers: int, alpha: float, target: float | None, exponent: float, min_alpha: float) -> None:
        self.alphas = [alpha] * num_layers
        self.target = target
        self._exponent = exponent
        self._min_alpha = min_alpha
        self._has_fixed_target = target is not None
        self._history: list[list[float]] = []

    def observe(self, drifts: Sequence[float]) -> None:
        """Takes a measurement after the warm-up, one drift per layer, and adjusts the alphas once there is a target."""
        if self.target is None:
            self._history.append(list(drifts))
            if len(self._history) < NUM_TARGET_MEASUREMENTS:
                return
            finite = [x for row in self._history for x in row if math.isfinite(x) and x > 0]
            self._history = []
            self.target = median(finite) if finite else None
            return
        self.alphas = [
            adapted_alpha(alpha, drift, self.target, self._exponent, self._min_alpha)
            for alpha, drift in zip(self.alphas, drifts, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """Returns the state to store in a checkpoint."""
        return {"alphas": self.alphas, "target": self.target, "history": self._history}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint's state, except for its target if the configuration sets one."""
        self.alphas = list(state["alphas"])
        self._history = [list(row) for row in state["history"]]
        if not self._has_fixed_target:
            self.target = state["target"]
