"""The measures of a sweep as pure functions of losses.

`Losses` holds the final validation losses of one arm: learning rate -> seed -> loss, infinite where the run diverged.
Sources: LR sensitivity is that of Wortsman et al., arXiv 2309.14322; the others are defined here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Losses = Mapping[float, Mapping[int, float]]


def mean(values: Collection[float]) -> float:
    """Returns the mean, which is infinite if a value is."""
    return sum(values) / len(values)


def best_rate(losses: Losses) -> float | None:
    """Returns the rate with the lowest mean loss over its seeds, or None if every rate has a diverged run."""
    means = {rate: mean(by_seed.values()) for rate, by_seed in losses.items()}
    finite = {rate: value for rate, value in means.items() if math.isfinite(value)}
    return min(finite, key=finite.__getitem__) if finite else None


def usable_rates(losses: Losses, limit: float) -> list[float]:
    """Returns the rates at which the loss of every seed is at most `limit`, ascending."""
    return [rate for rate in sorted(losses) if all(loss <= limit for loss in losses[rate].values())]


def range_around(rate: float | None, usable: Collection[float], rates: Collection[float]) -> tuple[float, float] | None:
    """Returns the ends of the contiguous range of usable rates around `rate`, or None if `rate` is not usable."""
    if rate is None or rate not in usable:
        return None
    ordered = sorted(rates)
    low = high = ordered.index(rate)
    while low > 0 and ordered[low - 1] in usable:
        low -= 1
    while high < len(ordered) - 1 and ordered[high + 1] in usable:
        high += 1
    return ordered[low], ordered[high]


def sensitivity(losses: Mapping[float, float], start_loss: float) -> float:
    """Returns the LR sensitivity of one seed: the mean over the rates of min(loss, start loss) - lowest loss.

    Args:
        losses: rate -> final loss, with rates at equal ratios; a non-finite loss counts as the start loss.
        start_loss: The loss at initialisation.
    """
    capped = [min(loss, start_loss) if math.isfinite(loss) else start_loss for loss in losses.values()]
    return mean(capped) - min(capped)


class PilotScore(NamedTuple):
    """The losses of one alpha over the pilot's rates; a diverged run counts as the loss at initialisation."""

    lowest: float
    mean: float


def pilot_score(losses: Collection[float], start_loss: float) -> PilotScore:
    """Returns the score by which the pilot compares alphas."""
    capped = [loss if math.isfinite(loss) else start_loss for loss in losses]
    return PilotScore(min(capped), mean(capped))


def choose_alpha(scores: Mapping[float, PilotScore], tolerance: float) -> float:
    """Returns, of the alphas whose lowest loss is within `tolerance` of the best, the one with the lowest mean.

    The mean alone would favour a small alpha that does no harm at rates that are too high anyway; the lowest loss
    alone, an alpha that is slightly better at one rate and useless above it.
    """
    limit = min(score.lowest for score in scores.values()) + tolerance
    good = {alpha: score.mean for alpha, score in scores.items() if score.lowest <= limit}
    return min(good, key=good.__getitem__)


def first_reach(curve: Sequence[tuple[int, int, float]], target: float) -> tuple[int, int] | None:
    """Returns (steps, tokens) of the first validation loss of at most `target`, or None.

    Args:
        curve: (step, tokens, loss) of every validation.
    """
    return next(((step, tokens) for step, tokens, loss in curve if loss <= target), None)


@dataclass(frozen=True)
class Reach:
    """What an arm needs to reach the baseline's best final loss, as fractions of what the baseline needs, by seed.

    Each seed has its own target: the final loss of the baseline's run with that seed at the baseline's best rate. What
    the baseline needs is taken at the rate at which it reaches the target first.

    Attributes:
        rate: The arm's rate at which the most seeds reach their targets, and of these the fastest on average.
        tokens: The fraction of tokens, of the seeds that reach their target.
        seconds: The same for steps times the timed seconds per step; empty without timing.
        num_seeds: The number of seeds that have a target.
        spacing: Tokens between two validations as a fraction of what the baseline needs, the maximum over seeds: the
            resolution of `tokens`.
    """

    rate: float
    tokens: dict[int, float]
    seconds: dict[int, float]
    num_seeds: int
    spacing: float


@dataclass(frozen=True)
class Pace:
    """Seconds per step of an arm from interleaved timing, and the overhead over the baseline of the same round.

    Attributes:
        step_seconds: The median over the rounds.
        overhead: The median over the rounds of seconds / baseline's seconds - 1.
        low, high: The extremes of the overhead.
    """

    step_seconds: float
    overhead: float
    low: float
    high: float


@dataclass(frozen=True)
class ArmMeasures:
    """All measures of one arm in one grid.

    Attributes:
        alpha: The alpha of its query/key policy, from the pilot or its own; None without a policy.
        best_rate, best_losses: The rate with the lowest mean, and the final loss of each seed there.
        usable: The usable rates, ascending: all seeds are within the tolerance of the grid's best.
        highest_by_seed: The highest rate that is usable by each seed alone.
        usable_range: The ends of the usable range around best_rate.
        own_highest: The highest rate at which all seeds are within the tolerance of this arm's own best mean.
        sensitivity: The LR sensitivity of the seeds that have every rate of the grid and a finite loss at some rate.
        num_diverged, num_missing: Numbers of cells.
    """

    arm: str
    alpha: float | None
    losses: dict[float, dict[int, float]]
    best_rate: float | None
    best_losses: dict[int, float]
    usable: list[float]
    highest_by_seed: dict[int, float | None]
    usable_range: tuple[float, float] | None
    own_highest: float | None
    sensitivity: dict[int, float]
    num_diverged: int
    num_missing: int
    reach: Reach | None
    pace: Pace | None

    @property
    def highest(self) -> float | None:
        """The highest usable rate, or None."""
        return max(self.usable, default=None)

    @property
    def gaps(self) -> list[float]:
        """Rates that are not usable although a lower and a higher one are."""
        inside = [rate for rate in self.losses if self.usable and self.usable[0] < rate < self.usable[-1]]
        return [rate for rate in inside if rate not in self.usable]

    @property
    def best_mean(self) -> float:
        """The mean over seeds at the best rate; infinite if there is none."""
        return mean(self.best_losses.values()) if self.best_losses else math.inf


@dataclass(frozen=True)
class GridMeasures:
    """All measures of one grid.

    Attributes:
        limit: The highest final loss at which a rate is usable; infinite if every rate of every arm has a diverged run.
        pilot: arm -> alpha -> score.
    """

    name: str
    baseline: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    tolerance: float
    limit: float
    arms: dict[str, ArmMeasures]
    pilot: dict[str, dict[float, PilotScore]]

    @property
    def best_arm(self) -> ArmMeasures:
        """The arm with the lowest mean loss over seeds."""
        return min(self.arms.values(), key=lambda arm: arm.best_mean)

    @property
    def others(self) -> list[ArmMeasures]:
        """All arms except the baseline."""
        return [arm for name, arm in self.arms.items() if name != self.baseline]
