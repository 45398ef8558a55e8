"""The measures of a sweep: pure functions of losses.

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
    """Infinite where one of the values is."""
    return sum(values) / len(values)


def best_rate(losses: Losses) -> float | None:
    """The rate with the lowest mean loss over its seeds; None where every rate has a diverged run."""
    means = {rate: mean(by_seed.values()) for rate, by_seed in losses.items()}
    finite = {rate: value for rate, value in means.items() if math.isfinite(value)}
    return min(finite, key=finite.__getitem__) if finite else None


def usable_rates(losses: Losses, limit: float) -> list[float]:
    """The rates at which the loss of every seed is at most `limit`, ascending."""
    return [rate for rate in sorted(losses) if all(loss <= limit for loss in losses[rate].values())]


def range_around(rate: float | None, usable: Collection[float], rates: Collection[float]) -> tuple[float, float] | None:
    """The lowest and highest of the usable rates that lie next to each other on the grid around `rate`.

    None where `rate` itself is not usable.
    """
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
    """LR sensitivity of one seed: the mean over the rates of min(loss, start loss) - lowest loss.

    Args:
        losses: rate -> final loss, the rates at equal ratios; what is not finite counts as the start loss.
        start_loss: at initialisation.
    """
    capped = [min(loss, start_loss) if math.isfinite(loss) else start_loss for loss in losses.values()]
    return mean(capped) - min(capped)


class PilotScore(NamedTuple):
    """The losses of one alpha over the pilot's rates, a diverged run counting as the loss at initialisation."""

    lowest: float
    mean: float


def pilot_score(losses: Collection[float], start_loss: float) -> PilotScore:
    """What the pilot compares alphas by."""
    capped = [loss if math.isfinite(loss) else start_loss for loss in losses]
    return PilotScore(min(capped), mean(capped))


def choose_alpha(scores: Mapping[float, PilotScore], tolerance: float) -> float:
    """Of the alphas with about the lowest loss (within `tolerance`), the one with the lowest mean over the rates.

    The mean alone would favour a small alpha that does no harm at rates which are too high anyway; the lowest loss
    alone, one that is a hair better at one rate and useless above it.
    """
    limit = min(score.lowest for score in scores.values()) + tolerance
    good = {alpha: score.mean for alpha, score in scores.items() if score.lowest <= limit}
    return min(good, key=good.__getitem__)


def first_reach(curve: Sequence[tuple[int, int, float]], target: float) -> tuple[int, int] | None:
    """(steps, tokens) until a validation loss is first at most `target`; None where none is.

    Args:
        curve: (step, tokens, loss) of every validation.
    """
    return next(((step, tokens) for step, tokens, loss in curve if loss <= target), None)


@dataclass(frozen=True)
class Reach:
    """How soon an arm has the baseline's best final loss, as fractions of what the baseline needs for it, by seed.

    Each seed has its own target, the final loss of the baseline's run with that seed at the baseline's best rate. What
    the baseline needs for it is taken at the rate at which it is there soonest.

    Attributes:
        rate: the arm's rate at which the most seeds get there, and of these the soonest on average.
        tokens: of the seeds that get there.
        seconds: the same, steps times the timed seconds of a step; empty without timing.
        num_seeds: that have a target.
        spacing: tokens between two validations as a fraction of what the baseline needs, of the seed with the largest:
            how finely `tokens` is known.
    """

    rate: float
    tokens: dict[int, float]
    seconds: dict[int, float]
    num_seeds: int
    spacing: float


@dataclass(frozen=True)
class Pace:
    """Seconds a step of an arm from interleaved timing, by round, and what they add to the baseline's of that round.

    Attributes:
        step_seconds: median over the rounds.
        overhead: median over the rounds of seconds / baseline's seconds - 1; low, high: the extremes.
    """

    step_seconds: float
    overhead: float
    low: float
    high: float


@dataclass(frozen=True)
class ArmMeasures:
    """All measures of one arm in one grid.

    Attributes:
        alpha: of its query/key policy, from the pilot or its own; None without a policy.
        best_rate, best_losses: the rate with the lowest mean, and the final loss of each seed there.
        usable: the usable rates, ascending: all seeds within the tolerance of the grid's best.
        highest_by_seed: the highest rate that is usable by this seed alone.
        usable_range: the usable rates around best_rate.
        own_highest: the highest rate at which all seeds are within the tolerance of this arm's own best mean.
        sensitivity: of the seeds that have every rate of the grid and did not diverge at all of them.
        num_diverged, num_missing: cells.
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
        """The highest usable rate."""
        return max(self.usable, default=None)

    @property
    def gaps(self) -> list[float]:
        """Rates that are not usable although a lower and a higher one are."""
        inside = [rate for rate in self.losses if self.usable and self.usable[0] < rate < self.usable[-1]]
        return [rate for rate in inside if rate not in self.usable]

    @property
    def best_mean(self) -> float:
        """The mean over seeds at the best rate; infinite where there is none."""
        return mean(self.best_losses.values()) if self.best_losses else math.inf


@dataclass(frozen=True)
class GridMeasures:
    """All measures of one grid.

    Attributes:
        limit: the highest final loss at which a rate is usable; infinite where every rate has a diverged run.
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
        """All arms but the baseline."""
        return [arm for name, arm in self.arms.items() if name != self.baseline]
