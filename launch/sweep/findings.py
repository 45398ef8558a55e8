"""The findings of a sweep in sentences generated from its measures: they claim no more than the numbers show."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from launch.sweep.measures import ArmMeasures, GridMeasures, mean


def describe_grid(grid: GridMeasures) -> str:
    """Returns the paragraph about one grid."""
    return " ".join(_sentences(grid))


def _sentences(grid: GridMeasures) -> Iterator[str]:
    if not any(arm.losses for arm in grid.arms.values()):
        yield "No run has ended yet, so there is nothing to compare."
        return
    if math.isinf(grid.limit):
        seeds = " with at least one seed" if len(grid.seeds) > 1 else ""
        yield f"Every arm diverged at every learning rate{seeds}, so there is nothing to compare."
    else:
        yield from _range_sentences(grid)
        yield from _loss_sentences(grid)
        yield from _time_sentences(grid)
    incomplete = [arm for arm in grid.arms.values() if arm.num_missing]
    if incomplete:
        missing = ", ".join(f"{arm.num_missing} of {arm.arm}" for arm in incomplete)
        yield f"Cells without a result are excluded throughout ({missing})."
    if math.isfinite(grid.limit):
        yield _seed_sentence(grid)


def _range_sentences(grid: GridMeasures) -> Iterator[str]:
    best = grid.best_arm
    listed = "; ".join(_highest(grid, arm) for arm in grid.arms.values())
    is_complete = not any(arm.num_missing for arm in grid.arms.values())
    every = "for every seed" if is_complete else "for every seed that has a result"
    seeds = every if len(grid.seeds) > 1 else "with a single seed"
    yield (
        f"Highest usable learning rate (final validation loss within {grid.tolerance:g} of {best.best_mean:.3f}, the "
        f"lowest mean of any arm, {seeds}): {listed}."
    )
    for arm in grid.arms.values():
        if arm.gaps:
            unusable = ", ".join(f"{rate:g}" for rate in arm.gaps)
            yield f"However, {arm.arm} is not usable at every lower learning rate: it is not usable at {unusable}."
    base = grid.arms[grid.baseline]
    others = [arm for arm in grid.others if arm.highest is not None]
    if base.highest is None and base.losses:
        own = (
            f"its best mean loss is {base.best_mean:.3f}, at {base.best_rate:g}"
            if base.best_rate is not None
            else f"it {_without_loss(base)}"
        )
        yield f"{grid.baseline} has no usable learning rate by this criterion ({own}), so no factor can be stated."
    if base.highest is None or not others:
        return
    widest = max(others, key=lambda arm: (arm.highest or 0.0, -arm.best_mean))
    assert widest.highest is not None
    factor = widest.highest / base.highest
    if base.highest == grid.rates[-1]:
        yield f"{grid.baseline} is usable up to the highest learning rate tried, so this grid shows no limit for it."
    elif factor > 1:
        yield from _range_by_seed(grid, widest, base)
    else:
        how = "equal to" if factor == 1 else "lower than"
        yield (
            f"The highest of the other arms, that of {widest.arm}, is {how} that of {grid.baseline}, so no gain is "
            "observed."
        )
    if len(grid.rates) > 1:
        steps = [high / low for low, high in zip(grid.rates, grid.rates[1:], strict=False)]
        yield (
            f"Adjacent learning rates differ by a factor of {_span(steps, '.2g')}; the highest usable ones are known "
            "only to that resolution, so the true ratio of two of them may be smaller or larger by as much."
        )


def _range_by_seed(grid: GridMeasures, widest: ArmMeasures, base: ArmMeasures) -> Iterator[str]:
    if len(grid.seeds) == 1:
        return
    pairs = [(widest.highest_by_seed.get(seed), base.highest_by_seed.get(seed)) for seed in grid.seeds]
    factors = [mine / theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    if len(factors) == len(grid.seeds):
        yield (
            f"For each seed alone, the highest usable learning rate of {widest.arm} is {_span(factors, '.3g')} times "
            f"that of {grid.baseline}."
        )


def _loss_sentences(grid: GridMeasures) -> Iterator[str]:
    base = grid.arms[grid.baseline]
    broken = [f"{arm.arm} {_without_loss(arm)}" for arm in grid.arms.values() if arm.best_rate is None]
    if broken:
        yield f"{'; '.join(broken)}."
    if base.best_rate is not None:
        yield f"Best mean final loss of {grid.baseline}: {_best(base)}."
    others = [arm for arm in grid.others if arm.best_rate is not None]
    if not others:
        return
    lowest = min(others, key=lambda arm: arm.best_mean)
    subject = f"The lowest of the {len(others)} other arms is that" if len(others) > 1 else "Best mean final loss"
    comparison = f", {compare(lowest, base)}" if base.best_rate is not None else ""
    yield f"{subject} of {lowest.arm}: {_best(lowest)}{comparison}."


def compare(arm: ArmMeasures, other: ArmMeasures) -> str:
    """Compares the best mean losses of two arms, and says whether the seeds support the difference.

    Both arms must have a best loss.
    """
    mine, theirs = arm.best_losses.values(), other.best_losses.values()
    difference = f"{abs(arm.best_mean - other.best_mean):.3f}"
    if float(difference) == 0:
        return f"equal to that of {other.arm} to three decimals"
    size = f"{difference} {'lower' if arm.best_mean < other.best_mean else 'higher'} than that of {other.arm}"
    if min(len(mine), len(theirs)) == 1:
        return f"{size}, which may be chance with a single seed"
    if overlap(mine, theirs):
        return f"{size}, but not distinguishable: the ranges of the seeds overlap"
    return f"{size}, and the ranges of the seeds do not overlap"


def _time_sentences(grid: GridMeasures) -> Iterator[str]:
    base = grid.arms[grid.baseline]
    if base.best_rate is None:
        if grid.others:
            yield f"{grid.baseline} has no best loss, so no time to reach it is stated."
        return
    there = [arm for arm in grid.others if arm.reach is not None and len(arm.reach.tokens) == arm.reach.num_seeds]
    partly = [arm for arm in grid.others if arm.reach is not None and arm not in there]
    goal = f"the best final loss of {grid.baseline}"
    if there:
        listed = "; ".join(f"{arm.arm} {_reach(arm)}" for arm in there)
        yield f"To reach {goal}, as a fraction of what {grid.baseline} itself needs: {listed}."
        yield from _saving(grid, there)
    if partly:
        listed = ", ".join(
            f"{arm.arm} ({len(arm.reach.tokens)} of {arm.reach.num_seeds})" for arm in partly if arm.reach
        )
        yield f"These arms reached {goal} with some seeds only: {listed}."
    rest = [arm.arm for arm in grid.others if arm.reach is None and arm.losses]
    if rest:
        yield f"These arms did not reach {goal} at any learning rate: {', '.join(rest)}."


def _saving(grid: GridMeasures, there: Sequence[ArmMeasures]) -> Iterator[str]:
    """Says whether the fastest arm saves anything."""

    def ratios(arm: ArmMeasures) -> Collection[float]:
        assert arm.reach is not None
        return (arm.reach.seconds or arm.reach.tokens).values()

    fastest = min(there, key=lambda arm: mean(ratios(arm)))
    assert fastest.reach is not None
    found, share = ratios(fastest), fastest.reach.spacing
    what, doubt = "tokens", f"the spacing of the validations ({100 * share:.2g} % of what {grid.baseline} needs)"
    low = high = 1.0
    if fastest.reach.seconds and fastest.pace is not None:
        what, doubt = "seconds", f"{doubt} and the range of its timing"
        low, high = ((1 + end) / (1 + fastest.pace.overhead) for end in (fastest.pace.low, fastest.pace.high))
    if max(found) * high < 1 - share:
        yield (
            f"{fastest.arm} therefore saves {_span([100 * (1 - value) for value in found], '.0f')} % of the {what} "
            f"with {'each seed' if len(found) > 1 else 'the single seed'}, more than {doubt} could account for."
        )
    elif min(found) * low > 1 + share:
        yield f"No arm saves {what}: even the fastest, {fastest.arm}, needs more than {grid.baseline}."
    else:
        yield (
            f"No saving of {what} is shown: the fastest arm, {fastest.arm}, is not ahead with every seed by more than "
            f"{doubt} could account for."
        )


def _seed_sentence(grid: GridMeasures) -> str:
    if len(grid.seeds) == 1:
        return "There is only one seed, so nothing is known about chance."
    alike = math.comb(2 * len(grid.seeds), len(grid.seeds)) // 2
    return (
        f"Ranges are over {len(grid.seeds)} seeds, which is not a test of significance: the ranges of two equal arms "
        f"are disjoint by chance one time in {alike}, and more often if one arm is the best of several."
    )


def overlap(first: Collection[float], second: Collection[float]) -> bool:
    """Returns whether the ranges of two groups of numbers overlap."""
    return min(first) <= max(second) and min(second) <= max(first)


def _highest(grid: GridMeasures, arm: ArmMeasures) -> str:
    """Describes the highest usable rate, and its ratio to the baseline's if it is higher."""
    base, top = grid.arms[grid.baseline].highest, grid.rates[-1]
    if arm.highest is None:
        return f"no usable rate for {arm.arm}" if arm.losses else f"no result for {arm.arm}"
    notes = []
    if base is not None and arm.highest > base:
        notes.append(f"{arm.highest / base:.3g} times that of {grid.baseline}")
    if arm.highest == top and len(grid.rates) > 1:
        notes.append("the highest tried")
    return f"{arm.highest:g} for {arm.arm}" + (f" ({', '.join(notes)})" if notes else "")


def _without_loss(arm: ArmMeasures) -> str:
    """Says why an arm has no best loss."""
    if not arm.losses:
        return "has no result"
    is_every = all(math.isinf(loss) for by_seed in arm.losses.values() for loss in by_seed.values())
    known = " that has a result" if arm.num_missing else ""
    return f"diverged at every learning rate{known}{'' if is_every else ' with at least one seed'}"


def _best(arm: ArmMeasures) -> str:
    values = arm.best_losses.values()
    spread = f" (seeds {_span(values, '.3f')})" if len(values) > 1 else ""
    return f"{arm.best_mean:.3f}{spread} at {arm.best_rate:g}"


def _reach(arm: ArmMeasures) -> str:
    assert arm.reach is not None
    parts = [f"{_ratio(arm.reach.tokens)} of the tokens"]
    if arm.reach.seconds:
        parts.append(f"{_ratio(arm.reach.seconds)} of the seconds")
    return f"{' and '.join(parts)} (at {arm.reach.rate:g})"


def _ratio(by_seed: Mapping[int, float]) -> str:
    text, span = f"{mean(by_seed.values()):.2f}", _span(by_seed.values(), ".2f")
    return text if text == span else f"{text} (seeds {span})"


def _span(values: Collection[float], form: str) -> str:
    """Returns `0.70 to 0.74`, or one number if both ends are formatted alike."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
