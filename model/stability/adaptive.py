"""The policy `adaptive`: a controller of every layer's query/key learning rate. This project's own, not from a paper.

How far a step moves the logits is a product of the learning rate and of weights and inputs that change during training.
The controller measures it, and moves each layer's alpha so that the drift stays at a target:

    alpha_l <- clip(alpha_l (target / drift_l)^exponent, min_alpha, 1)

The drift is the change of the logits that the query/key weights cause for *fixed* attention inputs
(`launch.attention_control.probe` measures it), a step at the peak rate: each step counts as much as its rate is of the
peak, so that the controller does not undo the schedule's decay. Without a target, the median over all layers of the
first ten measurements after the warm-up becomes the target; alpha stays where it starts until then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

NUM_TARGET_MEASUREMENTS = 10


def adapted_alpha(alpha: float, drift: float, target: float, exponent: float, min_alpha: float) -> float:
    """A layer's next alpha, between min_alpha and 1; a drift of zero leaves it unchanged, as does one not finite."""
    if drift <= 0 or not math.isfinite(drift):
        return alpha
    return min(max(alpha * (target / drift) ** exponent, min_alpha), 1.0)


class AdaptiveController:
    """Alpha of every layer.

    Attributes:
        alphas: one a layer, the learning rate of its query/key matrices relative to the base rate.
        target: drift to hold; None until enough was measured.
    """

    def __init__(self, num_layers: int, alpha: float, target: float | None, exponent: float, min_alpha: float) -> None:
        self.alphas = [alpha] * num_layers
        self.target = target
        self._exponent = exponent
        self._min_alpha = min_alpha
        self._has_fixed_target = target is not None
        self._history: list[list[float]] = []

    def observe(self, drifts: Sequence[float]) -> None:
        """Takes one measurement after the warm-up, one drift a layer, and moves alphas once there is a target."""
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
        """For a checkpoint."""
        return {"alphas": self.alphas, "target": self.target, "history": self._history}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes a checkpoint's alphas, and its target unless the configuration sets one."""
        self.alphas = list(state["alphas"])
        self._history = [list(row) for row in state["history"]]
        if not self._has_fixed_target:
            self.target = state["target"]
