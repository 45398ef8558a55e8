"""What a sweep has found, in words made from its numbers: they say no more than the numbers show."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from launch.sweep.measures import ArmMeasures, GridMeasures, mean


def describe_grid(grid: GridMeasures) -> str:
    """The paragraph about one grid."""
    return " ".join(_sentences(grid))


def _sentences(grid: GridMeasures) -> Iterator[str]:
    if not any(arm.losses for arm in grid.arms.values()):
        yield "No run has ended yet; there is nothing to compare."
        return
    if math.isinf(grid.limit):
        some = " with some seed" if len(grid.seeds) > 1 else ""
        yield f"Every arm diverged at every rate{some}; there is nothing to compare."
    else:
        yield from _about_range(grid)
        yield from _about_loss(grid)
        yield from _about_time(grid)
    incomplete = [arm for arm in grid.arms.values() if arm.num_missing]
    if incomplete:
        missing = ", ".join(f"{arm.num_missing} of {arm.arm}" for arm in incomplete)
        yield f"Some cells have no result ({missing}); all of this leaves them out."
    if math.isfinite(grid.limit):
        yield _about_seeds(grid)


def _about_range(grid: GridMeasures) -> Iterator[str]:
    best = grid.best_arm
    listed = "; ".join(f"{name} {_highest(grid, arm)}" for name, arm in grid.arms.items())
    is_complete = not any(arm.num_missing for arm in grid.arms.values())
    which = "every seed" if is_complete else "every seed that has a result"
    seeds = f"with {which if len(grid.seeds) > 1 else 'its one seed'}"
    yield (
        f"Highest usable learning rate (final validation loss within {grid.tolerance:g} of {best.best_mean:.3f}, the "
        f"best of any arm, {seeds}): {listed}."
    )
    for arm in grid.arms.values():
        if arm.gaps:
            unusable = ", ".join(f"{rate:g}" for rate in arm.gaps)
            yield f"But {arm.arm} is not usable at every lower one: not at {unusable}."
    base = grid.arms[grid.baseline]
    others = [arm for arm in grid.others if arm.highest is not None]
    if base.highest is None and base.losses:
        own = (
            f"its best mean loss is {base.best_mean:.3f}, at {base.best_rate:g}"
            if base.best_rate is not None
            else _without_loss(base)
        )
        yield f"{grid.baseline} has no usable rate by that measure ({own}), so there is no factor to state."
    if base.highest is None or not others:
        return
    widest = max(others, key=lambda arm: (arm.highest or 0.0, -arm.best_mean))
    assert widest.highest is not None
    factor = widest.highest / base.highest
    if base.highest == grid.rates[-1]:
        yield f"{grid.baseline} is usable up to the highest rate tried, so these rates show no limit of it."
    elif factor > 1:
        yield from _range_by_seed(grid, widest, base)
    else:
        how = "the same as" if factor == 1 else "lower than"
        yield f"The highest among the other arms, that of {widest.arm}, is {how} {grid.baseline}'s: no gain is seen."
    if len(grid.rates) > 1:
        steps = [high / low for low, high in zip(grid.rates, grid.rates[1:], strict=False)]
        yield (
            f"Rates were tried at ratios of {_span(steps, '.2g')}; highest rates are known no more finely than that, "
            "so the factor between two of them may in truth be smaller or larger by as much."
        )


def _range_by_seed(grid: GridMeasures, widest: ArmMeasures, base: ArmMeasures) -> Iterator[str]:
    if len(grid.seeds) == 1:
        return
    pairs = [(widest.highest_by_seed.get(seed), base.highest_by_seed.get(seed)) for seed in grid.seeds]
    factors = [mine / theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    if len(factors) == len(grid.seeds):
        yield f"For {widest.arm}, each seed taken alone gives {_span(factors, '.3g')} times {grid.baseline}'s."


def _about_loss(grid: GridMeasures) -> Iterator[str]:
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
    several = f"The lowest of the {len(others)} other arms is that" if len(others) > 1 else "Best mean final loss"
    beside = f", {compare(lowest, base)}" if base.best_rate is not None else ""
    yield f"{several} of {lowest.arm}: {_best(lowest)}{beside}."


def compare(arm: ArmMeasures, other: ArmMeasures) -> str:
    """How the best mean loss of an arm lies to another's, and what the seeds say about that. Both have one."""
    mine, theirs = arm.best_losses.values(), other.best_losses.values()
    difference = f"{abs(arm.best_mean - other.best_mean):.3f}"
    if float(difference) == 0:
        return f"the same as {other.arm}'s to three decimals"
    size = f"{difference} {'lower' if arm.best_mean < other.best_mean else 'higher'} than {other.arm}'s"
    if min(len(mine), len(theirs)) == 1:
        return f"{size}; with one seed that may be chance"
    if overlap(mine, theirs):
        return f"{size}, but not told apart: the ranges of the seeds overlap"
    return f"{size}, and the ranges of the seeds do not overlap"


def _about_time(grid: GridMeasures) -> Iterator[str]:
    base = grid.arms[grid.baseline]
    if base.best_rate is None:
        if grid.others:
            yield f"{grid.baseline} has no best loss, so no time to it is stated."
        return
    there = [arm for arm in grid.others if arm.reach is not None and len(arm.reach.tokens) == arm.reach.num_seeds]
    partly = [arm for arm in grid.others if arm.reach is not None and arm not in there]
    goal = f"{grid.baseline}'s best final loss"
    if there:
        listed = "; ".join(f"{arm.arm} {_reach(arm)}" for arm in there)
        yield f"To get to {goal}, as a fraction of what {grid.baseline} itself needs for it: {listed}."
        yield from _verdict(grid, there)
    if partly:
        listed = ", ".join(
            f"{arm.arm} ({len(arm.reach.tokens)} of {arm.reach.num_seeds})" for arm in partly if arm.reach
        )
        yield f"These got to {goal} with some seeds only: {listed}."
    rest = [arm.arm for arm in grid.others if arm.reach is None and arm.losses]
    if rest:
        yield f"These got to {goal} at no rate: {', '.join(rest)}."


def _verdict(grid: GridMeasures, there: Sequence[ArmMeasures]) -> Iterator[str]:
    """Whether the soonest arm saves anything."""

    def ratios(arm: ArmMeasures) -> Collection[float]:
        assert arm.reach is not None
        return (arm.reach.seconds or arm.reach.tokens).values()

    soonest = min(there, key=lambda arm: mean(ratios(arm)))
    assert soonest.reach is not None
    found, share = ratios(soonest), soonest.reach.spacing
    what, doubt = "tokens", f"the spacing of the validations ({100 * share:.2g} % of what {grid.baseline} needs)"
    fastest = slowest = 1.0
    if soonest.reach.seconds and soonest.pace is not None:
        what, doubt = "seconds", f"{doubt} and the range of its timing"
        fastest, slowest = ((1 + end) / (1 + soonest.pace.overhead) for end in (soonest.pace.low, soonest.pace.high))
    if max(found) * slowest < 1 - share:
        yield (
            f"So {soonest.arm} saves {what}, {_span([100 * (1 - value) for value in found], '.0f')} % with "
            f"{'each seed' if len(found) > 1 else 'the one seed'}, which is more than {doubt} could make up."
        )
    elif min(found) * fastest > 1 + share:
        yield f"No arm saves {what}: even the soonest, {soonest.arm}, needs more than {grid.baseline}."
    else:
        yield (
            f"No saving of {what} is shown: the soonest, {soonest.arm}, is not ahead with every seed by more than "
            f"{doubt} could make up."
        )


def _about_seeds(grid: GridMeasures) -> str:
    if len(grid.seeds) == 1:
        return "There is one seed, so nothing is known about chance."
    alike = math.comb(2 * len(grid.seeds), len(grid.seeds)) // 2
    return (
        f"Ranges are over {len(grid.seeds)} seeds, which is no test of significance: those of two equal arms lie apart "
        f"by chance one time in {alike}, and those of the best of several arms more often."
    )


def overlap(first: Collection[float], second: Collection[float]) -> bool:
    """Whether the ranges of two groups of numbers overlap."""
    return min(first) <= max(second) and min(second) <= max(first)


def _highest(grid: GridMeasures, arm: ArmMeasures) -> str:
    """The highest usable rate, and how many times the baseline's that is, if it is higher."""
    base, top = grid.arms[grid.baseline].highest, grid.rates[-1]
    if arm.highest is None:
        return "no usable one" if arm.losses else "no result"
    notes = []
    if base is not None and arm.highest > base:
        notes.append(f"{arm.highest / base:.3g} times")
    if arm.highest == top and len(grid.rates) > 1:
        notes.append("the highest tried")
    return f"{arm.highest:g}" + (f" ({', '.join(notes)})" if notes else "")


def _without_loss(arm: ArmMeasures) -> str:
    """Why an arm has no best loss."""
    if not arm.losses:
        return "has no result"
    is_every = all(math.isinf(loss) for by_seed in arm.losses.values() for loss in by_seed.values())
    known = " that has a result" if arm.num_missing else ""
    return f"diverged at every rate{known}{'' if is_every else ' with some seed'}"


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
    """`0.70 to 0.74`, or one number where both ends look alike."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
