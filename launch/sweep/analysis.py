"""Computes the measures of each grid from the runs of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from launch.sweep.cells import Alphas
from launch.sweep.measures import (
    ArmMeasures,
    GridMeasures,
    Losses,
    Pace,
    PilotScore,
    Reach,
    best_rate,
    choose_alpha,
    first_reach,
    mean,
    pilot_score,
    range_around,
    sensitivity,
    usable_rates,
)
from launch.sweep.results import Run
from launch.sweep.spec import Sweep

Rounds = Sequence[Mapping[str, float]]  # arm -> seconds per step, for each round of the timing


def pilot_scores(sweep: Sweep, runs: Sequence[Run]) -> dict[tuple[str, str], dict[float, PilotScore]]:
    """Returns (grid, arm) -> alpha -> score of the pilots whose cells have all ended."""
    scores: dict[tuple[str, str], dict[float, PilotScore]] = {}
    for name, grid in sweep.grids.items():
        for arm in grid.pilot.alphas if grid.pilot else ():
            mine = [run for run in runs if run.cell.is_pilot and (run.cell.grid, run.cell.arm) == (name, arm)]
            losses = {run.cell: run.final_loss for run in mine}
            if not mine or None in losses.values():
                continue
            start_loss = _start_loss(mine)
            scores[name, arm] = {
                alpha: pilot_score(
                    [loss for cell, loss in losses.items() if cell.alpha == alpha and loss is not None], start_loss
                )
                for alpha in sorted({cell.alpha for cell in losses if cell.alpha is not None})
            }
    return scores


def choose_alphas(sweep: Sweep, runs: Sequence[Run]) -> Alphas:
    """Returns the alphas chosen by the pilots whose cells have all ended."""
    return {key: choose_alpha(scores, sweep.tolerance) for key, scores in pilot_scores(sweep, runs).items()}


def measure(sweep: Sweep, runs: Sequence[Run], timing: Mapping[str, Rounds]) -> list[GridMeasures]:
    """Returns the measures of every grid.

    Args:
        runs: The runs of all cells, including pilots.
        timing: The rounds of each grid; grids may be missing.
    """
    scores = pilot_scores(sweep, runs)
    return [
        _measure_grid(
            sweep,
            name,
            [run for run in runs if run.cell.grid == name and not run.cell.is_pilot],
            timing.get(name, ()),
            {arm: by_alpha for (grid, arm), by_alpha in scores.items() if grid == name},
        )
        for name in sweep.grids
    ]


def _measure_grid(
    sweep: Sweep, name: str, runs: Sequence[Run], rounds: Rounds, pilot: dict[str, dict[float, PilotScore]]
) -> GridMeasures:
    grid = sweep.grids[name]
    by_arm = {arm: [run for run in runs if run.cell.arm == arm] for arm in sweep.arms_of(name)}
    losses = {arm: losses_of(mine) for arm, mine in by_arm.items()}
    means = [mean(by_seed.values()) for table in losses.values() for by_seed in table.values()]
    limit = min(means, default=math.inf) + sweep.tolerance
    paces = {arm: _pace(rounds, arm, sweep.baseline) for arm in by_arm}
    base_rate = best_rate(losses[sweep.baseline])
    targets = losses[sweep.baseline].get(base_rate, {}) if base_rate is not None else {}
    arms = {}
    for arm, mine in by_arm.items():
        reach = _reach(mine, by_arm[sweep.baseline], targets, paces[arm])
        arms[arm] = _measure_arm(arm, mine, losses[arm], limit, sweep.tolerance, grid.lrs, reach, paces[arm])
    return GridMeasures(
        name,
        sweep.baseline,
        tuple(sorted(grid.lrs)),
        grid.seeds,
        sweep.tolerance,
        limit,
        arms,
        pilot,
    )


def losses_of(runs: Sequence[Run]) -> dict[float, dict[int, float]]:
    """Returns rate -> seed -> final loss of the runs that have ended, with ascending rates."""
    table: dict[float, dict[int, float]] = {}
    for run in sorted(runs, key=lambda run: (run.cell.lr, run.cell.seed)):
        if run.final_loss is not None:
            table.setdefault(run.cell.lr, {})[run.cell.seed] = run.final_loss
    return table


def _measure_arm(
    arm: str,
    runs: Sequence[Run],
    losses: dict[float, dict[int, float]],
    limit: float,
    tolerance: float,
    rates: Sequence[float],
    reach: Reach | None,
    pace: Pace | None,
) -> ArmMeasures:
    best = best_rate(losses)
    best_losses = losses[best] if best is not None else {}
    usable = usable_rates(losses, limit) if math.isfinite(limit) else []
    own = usable_rates(losses, mean(best_losses.values()) + tolerance) if best_losses else []
    start_loss = _start_loss(runs)
    seeds = sorted({seed for by_seed in losses.values() for seed in by_seed})
    per_seed = {seed: _of_seed(losses, seed) for seed in seeds}
    return ArmMeasures(
        arm=arm,
        alpha=next((alpha for run in runs for alpha in (run.cell.alpha, run.alpha) if alpha is not None), None),
        losses=losses,
        best_rate=best,
        best_losses=best_losses,
        usable=usable,
        highest_by_seed={
            seed: max((rate for rate, loss in table.items() if loss <= limit and math.isfinite(loss)), default=None)
            for seed, table in per_seed.items()
        },
        usable_range=range_around(best, usable, rates),
        own_highest=max(own, default=None),
        sensitivity={
            seed: sensitivity(table, start_loss)
            for seed, table in per_seed.items()
            if len(rates) > 1 and len(table) == len(rates) and any(map(math.isfinite, table.values()))
        },
        num_diverged=sum(run.final_loss == math.inf for run in runs),
        num_missing=sum(run.final_loss is None for run in runs),
        reach=reach,
        pace=pace,
    )


def _of_seed(losses: Losses, seed: int) -> dict[float, float]:
    return {rate: by_seed[seed] for rate, by_seed in losses.items() if seed in by_seed}


def _start_loss(runs: Sequence[Run]) -> float:
    """Returns the mean loss at initialisation; infinite if none was recorded."""
    found = [run.start_loss for run in runs if math.isfinite(run.start_loss)]
    return mean(found) if found else math.inf


def _fastest(runs: Sequence[Run], targets: Mapping[int, float]) -> tuple[float, dict[int, tuple[int, int]]] | None:
    """Returns the rate at which the most seeds reach their targets, and of these the fastest on average.

    Returns:
        The rate, and seed -> (steps, tokens) until then; None if no seed reaches its target at any rate.
    """
    by_rate: dict[float, dict[int, tuple[int, int]]] = {}
    for run in runs:
        if run.final_loss is None or run.cell.seed not in targets:
            continue
        reached = first_reach(run.validation, targets[run.cell.seed])
        if reached is not None:
            by_rate.setdefault(run.cell.lr, {})[run.cell.seed] = reached
    return min(
        by_rate.items(),
        key=lambda item: (-len(item[1]), mean([tokens for _, tokens in item[1].values()]), item[0]),
        default=None,
    )


def _reach(
    runs: Sequence[Run], base_runs: Sequence[Run], targets: Mapping[int, float], pace: Pace | None
) -> Reach | None:
    """Returns the `Reach` of an arm, or None without targets or if no seed reaches its own."""
    mine, theirs = _fastest(runs, targets), _fastest(base_runs, targets)
    if mine is None or theirs is None:
        return None
    rate, reached = mine
    _, needed = theirs
    tokens = {seed: reached[seed][1] / needed[seed][1] for seed in reached}
    seconds = {}
    if pace is not None:
        seconds = {seed: (1 + pace.overhead) * reached[seed][0] / needed[seed][0] for seed in reached}
    between = max(run.validation[0][1] for run in (*runs, *base_runs) if run.validation)
    return Reach(rate, tokens, seconds, len(targets), max(between / needed[seed][1] for seed in reached))


def _pace(rounds: Rounds, arm: str, baseline: str) -> Pace | None:
    pairs = [(seconds[arm], seconds[baseline]) for seconds in rounds if arm in seconds and baseline in seconds]
    if not pairs:
        return None
    overheads = [mine / base - 1 for mine, base in pairs]
    return Pace(median(mine for mine, _ in pairs), median(overheads), min(overheads), max(overheads))
