"""Which steps are at fault: non-finite figures, and spikes of the loss or the gradient norm."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from configs.schema import TrainConfig

# Where the last figures hardly differ, noise is not a spike.
MIN_RELATIVE_DEVIATION = 1e-3


@dataclass(frozen=True)
class Fault:
    """What is wrong with a step, and what is to be done about it.

    Attributes:
        spike: the figure and its limit, in words; None: the loss or the gradients are not finite.
    """

    action: Literal["warn", "skip", "rollback", "stop"]
    spike: str | None = None


def spike_limit(past: Sequence[float], threshold_sigma: float) -> float:
    """What a figure must not exceed: the mean of the past ones and `threshold_sigma` of their standard deviations."""
    mean = statistics.fmean(past)
    deviation = math.sqrt(statistics.fmean((value - mean) ** 2 for value in past))
    return mean + threshold_sigma * max(deviation, MIN_RELATIVE_DEVIATION * abs(mean))


class StepJudge:
    """Judges the steps one after the other by `train.on_nonfinite` and `train.spike`.

    A spike is a loss or gradient norm above the limit that the last `window` steps set, once half of these are there.
    It joins them as no more than the limit, so that the one after it is told as well, and a level that stays becomes
    the usual one after a while. All ranks judge the same figures, and so alike.

    Attributes:
        may_skip: whether a step may have to be skipped, so that it must be judged before it is applied.
    """

    def __init__(self, settings: TrainConfig) -> None:
        spike = settings.spike
        skips_spikes = spike.action == "skip" and spike.threshold_sigma is not None
        self.may_skip = settings.on_nonfinite == "skip" or skips_spikes
        self._on_nonfinite = settings.on_nonfinite
        self._spike = spike
        self._past: dict[str, deque[float]] = {name: deque(maxlen=spike.window) for name in ("loss", "gradient norm")}
        self._was_spike = False

    def judge(self, loss: float, grad_norm: float) -> Fault | None:
        """The step's fault; None for a good one. Each step once, in their order.

        Of several spikes in a row that only warn, the first is told.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self.nonfinite()
        threshold_sigma = self._spike.threshold_sigma
        if threshold_sigma is None:
            return None
        spikes = []
        for (name, past), value in zip(self._past.items(), (loss, grad_norm), strict=True):
            limit = math.inf
            if 2 * len(past) >= self._spike.window:
                limit = spike_limit(past, threshold_sigma)
            if value > limit:
                spikes.append(
                    f"{name} {value:.4g} is above {limit:.4g} (mean of the last {len(past)} steps and "
                    f"{threshold_sigma:g} standard deviations)"
                )
            past.append(min(value, limit))
        is_repeated = self._was_spike and self._spike.action == "warn"
        self._was_spike = bool(spikes)
        return Fault(self._spike.action, "; ".join(spikes)) if spikes and not is_repeated else None

    def nonfinite(self) -> Fault:
        """The fault of a step without a finite loss or gradient."""
        return Fault(self._on_nonfinite)

    def state(self) -> dict[str, list[float]]:
        """The last figures, for a checkpoint."""
        return {name: list(past) for name, past in self._past.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Takes the last figures from a checkpoint."""
        for name, past in self._past.items():
            past.extend(state.get(name, ()))
