"""The anomaly policy: which steps are anomalous (non-finite values, spikes), and how the run responds.

`train.on_nonfinite` and `train.spike` configure it. If an action is to skip the step, each step is checked before the
optimizer applies it (`StepCheck`). Otherwise its report is checked one step later, and the host never waits for the
device.
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

MIN_RELATIVE_DEVIATION = 1e-3  # keeps noise from counting as a spike if the window's values hardly differ


@dataclass(frozen=True)
class Anomaly:
    """An anomaly of a step, and the configured action.

    Attributes:
        spike: A message with the value and its limit; None if the loss or the gradients are non-finite.
    """

    action: Literal["warn", "skip", "rollback", "stop"]
    spike: str | None = None


AnomalyCheck = Callable[[float, float], Anomaly | None]  # takes a step's loss and gradient norm


def spike_limit(past: Sequence[float], threshold_sigma: float) -> float:
    """The largest value that is not a spike: the mean of `past` plus `threshold_sigma` standard deviations."""
    mean = statistics.fmean(past)
    deviation = math.sqrt(statistics.fmean((value - mean) ** 2 for value in past))
    return mean + threshold_sigma * max(deviation, MIN_RELATIVE_DEVIATION * abs(mean))


class AnomalyPolicy:
    """Checks every step once, in order, according to `train.on_nonfinite` and `train.spike`.

    A spike is a loss or gradient norm above the `spike_limit` of the last `window` steps, once half the window is
    filled. It enters the window clamped to the limit, so that a following spike is still detected, while a level that
    persists becomes normal after some steps. All ranks check the same values and reach the same result.

    Attributes:
        may_skip: Whether steps may be skipped, and must therefore be checked before they are applied.
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
        """Returns the anomaly of a step, or None for a normal step.

        If the action is `warn`, only the first of consecutive spikes is reported.
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
                    f"{name} {value:.4g} is above {limit:.4g} (mean of the last {len(past)} steps plus "
                    f"{threshold_sigma:g} standard deviations)"
                )
            past.append(min(value, limit))
        is_repeated = self._was_spike and self._spike.action == "warn"
        self._was_spike = bool(spikes)
        return Anomaly(self._spike.action, "; ".join(spikes)) if spikes and not is_repeated else None

    def nonfinite(self) -> Anomaly:
        """The anomaly of a step with a non-finite loss or gradient."""
        return Anomaly(self._on_nonfinite)

    def state(self) -> dict[str, list[float]]:
        """The values in the window for a checkpoint."""
        return {name: list(past) for name, past in self._past.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restores the window from a checkpoint."""
        for name, past in self._past.items():
            past.extend(state.get(name, ()))


class StepCheck:
    """Checks one step before it is applied, once, however often DeepSpeed calls the base optimizer in the step.

    From ZeRO stage 1 on, DeepSpeed itself drops a step with a non-finite gradient norm: it does not call the base
    optimizer, so that such a step is never checked here. At stage 0 it never drops a step.

    Args:
        check: The check to run.
        local_loss: This rank's share of the loss.

    Attributes:
        was_made: Whether the step was checked.
        anomaly: The anomaly that was found, if any.
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
        """Checks the step on the first call, with the same result on all ranks. The first call is collective.

        Args:
            norm: Returns the global gradient norm. A negative value, DeepSpeed's marker of a non-finite norm, counts as
                NaN.
        """
        if self.was_made:
            return
        norms = norm().to(self._local_loss)
        both = torch.stack([self._local_loss, norms.where(norms >= 0, torch.nan) / dist.get_world_size()])
        dist.all_reduce(both)
        self.anomaly = self._check(*both.tolist())
        self.was_made = True
