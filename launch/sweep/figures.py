"""The plots of a sweep's report, one function each, which draws into a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from launch.sweep.measures import ArmMeasures, GridMeasures, mean
from launch.sweep.results import Run

# The palette of Okabe and Ito, which is safe for colour-blind readers. Dashes keep coinciding lines visible.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vPX<>*"
DASHES = ("-", "--", (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1.5)), "-.", (0, (1.5, 1.5)))
TOKENS_COLOR, SECONDS_COLOR = "#7fb3d9", "#f2b07b"
DODGE = 0.012  # decades between the arms' points at one rate
MARGIN = 0.12  # decades beside the lowest and the highest rate
HEADROOM = 1.6  # of the y-axis above the median loss, in units of median - lowest loss


@dataclass(frozen=True)
class Drawing:
    """A plot of the report.

    Attributes:
        name: The name of its file, without extension.
        text: What it shows.
        size: Width and height in inches.
        draw: Draws into a figure.
    """

    name: str
    title: str
    text: str
    size: tuple[float, float]
    draw: Callable[[Figure], None]


def make_drawings(grid: GridMeasures, runs: Sequence[Run]) -> list[Drawing]:
    """Returns the plots of one grid for which there are data.

    Args:
        runs: The runs of this grid.
    """
    if math.isinf(grid.limit):
        return []
    stress = stress_rate(grid)
    drawings = [
        Drawing(
            f"{grid.name}_loss_vs_lr",
            "Final loss against the learning rate",
            "Final validation loss: the mean over seeds as a line, each seed as a point, diverged runs as crosses at "
            "the upper edge, and triangles where the mean is above it. A line is interrupted where a learning rate has "
            "no finite mean. A learning rate is usable where every seed is below the dashed line.",
            (9, 5),
            lambda figure: draw_losses(figure, grid),
        ),
        Drawing(
            f"{grid.name}_curves",
            "Training at each arm's best learning rate",
            "Validation loss over the steps, mean over seeds, with the range of the seeds as a band; right: the last "
            "half.",
            (11, 4.5),
            lambda figure: draw_curves(figure, grid, runs),
        ),
    ]
    if any(run.attention for run in runs):
        drawings.append(
            Drawing(
                f"{grid.name}_logits",
                "Attention logits over training",
                "The largest attention logit and the mean change of a logit in one step, on a fixed probe batch, with "
                f"seed {grid.seeds[0]}. Top: at each arm's best learning rate; bottom: at {stress:g} for all arms. "
                "Crosses mark where a run diverged.",
                (11, 7.5),
                lambda figure: draw_logits(figure, grid, runs, stress),
            )
        )
    if any(arm.reach is not None for arm in grid.others):
        drawings.append(
            Drawing(
                f"{grid.name}_reach",
                f"Tokens and seconds to the best final loss of {grid.baseline}",
                f"As a fraction of what {grid.baseline} itself needs (bars: means over seeds, points: seeds). Seconds "
                "are steps times the timed seconds per step.",
                (9, 0.55 * len(grid.others) + 1.6),
                lambda figure: draw_reach(figure, grid),
            )
        )
    if any(arm.pace is not None for arm in grid.others):
        drawings.append(
            Drawing(
                f"{grid.name}_overhead",
                "Time per step",
                f"Relative to {grid.baseline}, by interleaved timing: median and range over the rounds.",
                (9, 0.45 * len(grid.others) + 1.4),
                lambda figure: draw_overhead(figure, grid),
            )
        )
    return drawings


def stress_rate(grid: GridMeasures) -> float:
    """Returns the lowest rate above those at which the baseline is near its own best loss, or the highest."""
    highest = grid.arms[grid.baseline].own_highest or 0.0
    return next((rate for rate in grid.rates if rate > highest), grid.rates[-1])


def draw_losses(figure: Figure, grid: GridMeasures) -> None:
    """Plots loss against LR. The y-axis ends a little above the losses near the best, which would else look flat."""
    axis = figure.subplots()
    finite = [
        loss
        for arm in grid.arms.values()
        for by_seed in arm.losses.values()
        for loss in by_seed.values()
        if math.isfinite(loss)
    ]
    low, middle = min(finite), float(np.median(finite))
    top = min(max(*finite, grid.limit), max(middle + HEADROOM * (middle - low), low + 4 * grid.tolerance))
    top += 0.08 * (top - low)
    for index, (name, arm) in enumerate(grid.arms.items()):
        shift = 10 ** (DODGE * (index - (len(grid.arms) - 1) / 2))
        style = _style(grid, name)
        means = {rate: mean(by_seed.values()) for rate, by_seed in arm.losses.items()}
        line = [means.get(rate, math.inf) for rate in grid.rates]
        line = [min(value, 2 * top) if math.isfinite(value) else math.nan for value in line]
        axis.plot([rate * shift for rate in grid.rates], line, **style, label=_label(arm), markersize=6)
        for rate, by_seed in arm.losses.items():
            values = list(by_seed.values())
            shown = [value for value in values if value <= top]
            axis.plot([rate * shift] * len(shown), shown, ".", color=style["color"], markersize=4, alpha=0.7)
            if any(math.isinf(value) for value in values):
                axis.plot(rate * shift, top, "x", color=style["color"], markersize=9, markeredgewidth=2, clip_on=False)
            elif means[rate] > top:
                axis.plot(rate * shift, top, "^", color=style["color"], markersize=7, fillstyle="none", clip_on=False)
    axis.axhline(grid.limit, color="black", linestyle="--", linewidth=0.9, label="usable below")
    axis.set(
        xlabel="base learning rate",
        ylabel="final validation loss (nats per token)",
        ylim=(low - 0.06 * (top - low), top),
    )
    _log_rates(axis, grid.rates)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def draw_curves(figure: Figure, grid: GridMeasures, runs: Sequence[Run]) -> None:
    """Plots validation loss over the steps at each arm's best rate."""
    whole, end = figure.subplots(1, 2)
    for name, arm in grid.arms.items():
        mine = [
            run for run in runs if run.cell.arm == name and run.cell.lr == arm.best_rate and run.final_loss is not None
        ]
        if not mine:
            continue
        steps = sorted(set.intersection(*({step for step, _, _ in run.validation} for run in mine)))
        table = np.array([[loss for step, _, loss in run.validation if step in steps] for run in mine])
        for axis, chosen in ((whole, slice(None)), (end, slice(len(steps) // 2, None))):
            axis.plot(
                steps[chosen],
                table.mean(axis=0)[chosen],
                **_line(grid, name),
                label=f"{name} at {arm.best_rate:g}",
            )
            axis.fill_between(
                steps[chosen],
                table.min(axis=0)[chosen],
                table.max(axis=0)[chosen],
                color=_style(grid, name)["color"],
                alpha=0.15,
                linewidth=0,
            )
    for axis, title in ((whole, "the whole run"), (end, "the last half")):
        axis.set(xlabel="step", ylabel="validation loss (nats per token)", title=title)
        axis.grid(alpha=0.3)
    _legend(whole)


def draw_logits(figure: Figure, grid: GridMeasures, runs: Sequence[Run], stress: float) -> None:
    """Plots the largest logit and mean change of a logit, at each arm's best rate and at one rate for all."""
    axes = figure.subplots(2, 2, sharex=True)
    for row, (where, rate_of) in enumerate(
        (("each arm's best rate", lambda arm: arm.best_rate), (f"learning rate {stress:g}", lambda arm: stress))
    ):
        for name, arm in grid.arms.items():
            run = next(
                (
                    run
                    for run in runs
                    if (run.cell.arm, run.cell.lr, run.cell.seed) == (name, rate_of(arm), grid.seeds[0])
                ),
                None,
            )
            points = [point for point in run.attention if math.isfinite(point[1] + point[2])] if run else []
            for column, axis in enumerate(axes[row]):
                label = f"{name} at {rate_of(arm):g}" if row == 0 and rate_of(arm) else name
                positive = [(point[0], point[1 + column]) for point in points if point[1 + column] > 0]
                axis.plot(*_columns(positive), **_line(grid, name), label=label)
                if run is not None and run.state == "diverged" and positive:
                    axis.plot(*positive[-1], "x", color=_style(grid, name)["color"], markersize=9, markeredgewidth=2)
        for axis, what in zip(axes[row], ("largest logit", "mean |Δlogit| per step"), strict=True):
            if any(len(line.get_xdata()) for line in axis.get_lines()):
                axis.set_yscale("log")
            axis.set(ylabel=what, title=where)
            axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    _legend(axes[0][0])
    _legend(axes[1][0])


def draw_reach(figure: Figure, grid: GridMeasures) -> None:
    """Draws bars for tokens and seconds; 1 is the baseline."""
    axis = figure.subplots()
    places = np.arange(len(grid.others))[::-1]
    for place, arm in zip(places, grid.others, strict=True):
        reach = arm.reach
        if reach is None:
            axis.text(0.01, place, "not reached at any learning rate", va="center", fontsize=9, color="#777777")
            continue
        for offset, by_seed, color in ((0.19, reach.tokens, TOKENS_COLOR), (-0.19, reach.seconds, SECONDS_COLOR)):
            if by_seed:
                axis.barh(place + offset, mean(by_seed.values()), height=0.34, color=color)
                axis.plot(list(by_seed.values()), [place + offset] * len(by_seed), "k.", markersize=5)
    axis.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axis.set_yticks(places, [_reach_label(arm) for arm in grid.others])
    axis.set(xlabel=f"fraction of what {grid.baseline} needs", xlim=(0, None))
    axis.set_ylim(-0.6, len(grid.others) - 0.4)
    is_timed = any(arm.reach is not None and arm.reach.seconds for arm in grid.others)
    for label, color in (("tokens", TOKENS_COLOR), ("seconds", SECONDS_COLOR))[: 2 if is_timed else 1]:
        axis.barh(0, 0, color=color, label=label)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axis.grid(alpha=0.3, axis="x")


def draw_overhead(figure: Figure, grid: GridMeasures) -> None:
    """Draws bars of the overhead in percent with the range of the rounds."""
    axis = figure.subplots()
    timed = [arm for arm in grid.others if arm.pace is not None]
    places = np.arange(len(timed))[::-1]
    for place, arm in zip(places, timed, strict=True):
        assert arm.pace is not None
        low, value, high = (100 * part for part in (arm.pace.low, arm.pace.overhead, arm.pace.high))
        axis.barh(place, value, height=0.55, color=_style(grid, arm.arm)["color"], alpha=0.75)
        axis.plot([low, high], [place, place], color="black", linewidth=1.2)
        axis.plot([low, high], [place, place], "k|", markersize=7)
    axis.axvline(0.0, color="black", linewidth=1)
    axis.set_yticks(places, [arm.arm for arm in timed])
    axis.set(xlabel=f"overhead in seconds per step over {grid.baseline} (%)")
    axis.grid(alpha=0.3, axis="x")


def _style(grid: GridMeasures, arm: str) -> dict[str, Any]:
    index = list(grid.arms).index(arm)
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def _line(grid: GridMeasures, arm: str) -> dict[str, Any]:
    index = list(grid.arms).index(arm)
    return {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.8}


def _label(arm: ArmMeasures) -> str:
    return arm.arm if arm.alpha is None else f"{arm.arm}, alpha {arm.alpha:g}"


def _reach_label(arm: ArmMeasures) -> str:
    if arm.reach is None:
        return arm.arm
    num_there, num_seeds = len(arm.reach.tokens), arm.reach.num_seeds
    return f"{arm.arm} at {arm.reach.rate:g}" + (f"\n{num_there} of {num_seeds} seeds" if num_there < num_seeds else "")


def _log_rates(axis: Any, rates: Sequence[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.set_xlim(rates[0] / 10**MARGIN, rates[-1] * 10**MARGIN)
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _legend(axis: Any) -> None:
    axis.legend(fontsize=8)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
