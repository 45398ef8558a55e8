"""The anomaly policy: which steps are anomalous (non-finite values, spikes), and what is done about them.

`train.on_nonfinite` and `train.spike` configure it. Where it may skip a step, the step is checked before the optimizer
applies it (`StepCheck`); otherwise the report is checked one step later, and the host never waits for the device.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist

from configs.schema import TrainConfig

MIN_RELATIVE_DEVIATION = 1e-3  # where the values in the window hardly differ, noise is not a spike


@dataclass(frozen=True)
class Anomaly:
    """What is wrong with a step, and the configured action.

    Attributes:
        spike: A message with the value and its limit; None if the loss or the gradients are not finite.
    """

    action: Literal["warn", "skip", "rollback", "stop"]
    spike: str | None = None


AnomalyCheck = Callable[[float, float], Anomaly | None]  # from the loss and the gradient norm of a step


def spike_limit(past: Sequence[float], threshold_sigma: float) -> float:
    """The largest value that is no spike: the mean of `past` plus `threshold_sigma` standard deviations."""
    mean = statistics.fmean(past)
    deviation = math.sqrt(statistics.fmean((value - mean) ** 2 for value in past))
    return mean + threshold_sigma * max(deviation, MIN_RELATIVE_DEVIATION * abs(mean))


class AnomalyPolicy:
    """Checks every step once, in order, by `train.on_nonfinite` and `train.spike`.

    A spike is a loss or gradient norm above the limit that the last `window` steps set, once half of these exist. It
    enters the window as no more than the limit, so that the next spike is found as well, and a level that persists
    becomes the normal one after a while. All ranks check the same values and so come to the same result.

    Attributes:
        may_skip: Whether a step may have to be skipped, so that it must be checked before it is applied.
    """

    def __init__(self, settings: TrainConfig) -> None:
        spike = settings.spike
        skips_spikes = spike.action == "skip" and spike.threshold_sigma is not None
        self.may_skip = settings.on_nonfinite == "skip" or skips_spikes
        self._on_nonfinite = settings.on_nonfinite
        self._spike = spike
        self._past: dict[str, deque[float]] = {name: deque(maxlen=spike.window) for name in ("loss", "gradient norm")}
        self._was_spike = False

    def check(self, loss: float, grad_norm: float) -> Anomaly | None:
        """The anomaly of a step; None for a normal one.

        If the action is only to warn, the first of several spikes in a row is reported.
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
        return Anomaly(self._spike.action, "; ".join(spikes)) if spikes and not is_repeated else None

    def nonfinite(self) -> Anomaly:
        """The anomaly of a step without a finite loss or gradient."""
        return Anomaly(self._on_nonfinite)

    def state(self) -> dict[str, list[float]]:
        """The values in the window, for a checkpoint."""
        return {name: list(past) for name, past in self._past.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Takes the window's values from a checkpoint."""
        for name, past in self._past.items():
            past.extend(state.get(name, ()))


class StepCheck:
    """Checks one step before it is applied, once, however many calls of the base optimizer the step takes.

    A step that DeepSpeed drops by itself because of non-finite gradients (ZeRO stage 3 in fp32) is never checked.

    Args:
        check: What decides.
        local_loss: This rank's part of the loss.

    Attributes:
        was_made: Whether the step was checked.
        anomaly: What was found.
    """

    def __init__(self, check: AnomalyCheck, local_loss: Tensor) -> None:
        self.was_made = False
        self.anomaly: Anomaly | None = None
        self._check = check
        self._local_loss = local_loss

    @property
    def skips_step(self) -> bool:
        """Whether the step was checked and must not be applied."""
        return self.anomaly is not None and self.anomaly.action == "skip"

    def make(self, norm: Callable[[], Tensor]) -> None:
        """Checks the step unless that was done; the result is the same on all ranks. Collective at the first call.

        Args:
            norm: Returns the global gradient norm, negative where DeepSpeed found it to be non-finite.
        """
        if self.was_made:
            return
        norms = norm().to(self._local_loss)
        both = torch.stack([self._local_loss, norms.where(norms >= 0, torch.nan) / dist.get_world_size()])
        dist.all_reduce(both)
        self.anomaly = self._check(*both.tolist())
        self.was_made = True
