"""Writes the report of a sweep: report.md, report.html, plots and results.csv."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.files import write_file
from launch.reporting.document import Block, to_html, to_markdown
from launch.sweep.findings import describe_grid
from launch.sweep.measures import ArmMeasures, GridMeasures, PilotScore, Reach, mean
from launch.sweep.outcome import cell_folder, failure
from launch.sweep.recommend import recommend
from launch.sweep.results import Run
from launch.sweep.spec import Sweep

MEASURES = (
    "arm",
    "alpha",
    "best loss",
    "at LR",
    "highest usable LR",
    "usable range (decades)",
    "within tolerance of own best up to",
    "LR sensitivity",
    "diverged",
    "tokens to baseline's best",
    "seconds to baseline's best",
    "seconds per step",
    "overhead",
)


def write_report(sweep: Sweep, grids: Sequence[GridMeasures], runs: Sequence[Run]) -> Path:
    """Writes the report into the sweep's folder and returns the report's folder."""
    from matplotlib.figure import Figure

    from launch.sweep.figures import make_drawings

    folder = sweep.folder / "report"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    blocks = [Block("heading", f"Sweep {sweep.name}", level=1), *_summary(grids)]
    for grid in grids:
        mine = [run for run in runs if run.cell.grid == grid.name and not run.cell.is_pilot]
        blocks += _grid_blocks(sweep, grid)
        for drawing in make_drawings(grid, mine):
            figure = Figure(figsize=drawing.size, layout="constrained")
            drawing.draw(figure)
            figure.savefig(folder / f"{drawing.name}.png", dpi=110)
            blocks += [
                Block("heading", drawing.title, level=3),
                Block("text", drawing.text),
                Block("image", drawing.title, file=f"{drawing.name}.png"),
            ]
    blocks += [*_failures(sweep, runs), *_method(sweep, grids)]
    write_file(folder / "report.md", to_markdown(blocks).encode())
    write_file(folder / "report.html", to_html(blocks, f"Sweep {sweep.name}").encode())
    write_file(folder / "results.csv", results_csv(sweep, runs).encode())
    return folder


def _summary(grids: Sequence[GridMeasures]) -> Iterator[Block]:
    for grid in grids:
        name = f"{grid.name}: " if len(grids) > 1 else ""
        yield Block("text", name + describe_grid(grid))


def _grid_blocks(sweep: Sweep, grid: GridMeasures) -> Iterator[Block]:
    yield Block("heading", f"Grid {grid.name}")
    about = sweep.grids[grid.name].about
    if about:
        yield Block("text", about)
    yield Block("table", lines=(MEASURES, *(tuple(measure_row(grid, arm)) for arm in grid.arms.values())))
    if math.isfinite(grid.limit):
        yield Block("heading", "Recommended", level=3)
        advice, _, overrides = recommend(sweep, grid).partition("\n\n")
        yield Block("text", advice.replace("\n", " "))
        if overrides:
            yield Block("code", overrides)
    if grid.pilot:
        yield Block("heading", "Pilot", level=3)
        pilot = sweep.grids[grid.name].pilot
        assert pilot is not None
        yield Block(
            "text",
            f"Lowest and mean final loss at the learning rates {', '.join(f'{rate:g}' for rate in pilot.lrs)} with "
            f"seed {pilot.seed}; a diverged run counts as the loss at initialisation. Of the alphas whose lowest loss "
            f"is within {sweep.tolerance:g} of the arm's lowest, the one with the lowest mean is used in the grid. "
            "Pilot runs that also belong to the grid are not repeated, so this seed favours the chosen alpha.",
        )
        alphas = sorted({alpha for scores in grid.pilot.values() for alpha in scores})
        rows = [
            (arm, *(_score_text(scores.get(alpha)) for alpha in alphas), f"{grid.arms[arm].alpha:g}")
            for arm, scores in grid.pilot.items()
        ]
        yield Block("table", lines=(("arm", *(f"alpha {alpha:g}" for alpha in alphas), "chosen"), *rows))


def _score_text(score: PilotScore | None) -> str:
    return "" if score is None else f"{score.lowest:.3f}, {score.mean:.3f}"


def measure_row(grid: GridMeasures, arm: ArmMeasures) -> Iterator[str]:
    """Yields the arm's row of the table, in the order of MEASURES."""
    yield arm.arm
    yield "" if arm.alpha is None else f"{arm.alpha:g}"
    yield _spread(list(arm.best_losses.values()), ".3f")
    yield _or_dash(arm.best_rate)
    by_seed = [_or_dash(rate) for rate in arm.highest_by_seed.values()]
    yield _or_dash(arm.highest) + (f" (seeds {', '.join(by_seed)})" if len(by_seed) > 1 else "")
    if arm.usable_range is None:
        yield "-"
    else:
        low, high = arm.usable_range
        yield f"{low:g} to {high:g} ({math.log10(high / low):.1f})"
    yield _or_dash(arm.own_highest)
    yield _spread(list(arm.sensitivity.values()), ".3f")
    yield str(arm.num_diverged)
    for seconds in (False, True):
        yield _reach_text(grid, arm.reach, seconds)
    if arm.pace is None:
        yield "not timed"
        yield "not timed"
    else:
        yield f"{arm.pace.step_seconds:.4g}"
        is_base = arm.arm == grid.baseline
        yield "-" if is_base else f"{arm.pace.overhead:+.1%} ({arm.pace.low:+.1%} to {arm.pace.high:+.1%})"


def _reach_text(grid: GridMeasures, reach: Reach | None, seconds: bool) -> str:
    if reach is None:
        return "not reached"
    values = list((reach.seconds if seconds else reach.tokens).values())
    if not values:
        return "not timed"
    seeds = f", {len(values)} of {reach.num_seeds} seeds" if len(values) < reach.num_seeds else ""
    return f"{_spread(values, '.2f')} at {reach.rate:g}{seeds}"


def _failures(sweep: Sweep, runs: Sequence[Run]) -> Iterator[Block]:
    missing = [run for run in runs if run.final_loss is None]
    if missing:
        yield Block("heading", "Cells without a result")
        rows = [(run.cell.name, run.state, failure(sweep, run.cell) or "") for run in missing]
        yield Block("table", lines=(("cell", "state", "reason"), *rows))


def _method(sweep: Sweep, grids: Sequence[GridMeasures]) -> Iterator[Block]:
    rule, timing = sweep.divergence, sweep.timing
    yield Block("heading", "How it was measured")
    yield Block(
        "text",
        f"A learning rate is usable if the final validation loss of every seed is within {sweep.tolerance:g} of the "
        "lowest mean loss of any arm of the grid; the usable range is the contiguous range of usable learning rates "
        "around the arm's best. LR sensitivity (Wortsman et al., arXiv 2309.14322) is the mean over the learning rates "
        "of min(final loss, loss at initialisation) minus the arm's lowest loss, for each seed. It is misleading if a "
        "learning rate means different things for different arms, so read it together with the curve. Values in "
        "brackets are the range over the seeds.",
    )
    if any(grid.pilot for grid in grids):
        yield Block(
            "text",
            f"The alpha of arms with a pilot was chosen by its losses, which is more tuning than {sweep.baseline} had.",
        )
    yield Block(
        "text",
        "A run counts as diverged, and is stopped, if its loss or gradients are not finite, or if the mean training "
        f"loss of {rule.window} steps exceeds the lower of the first loss and the lowest such mean so far by more than "
        f"{rule.margin:g}.",
    )
    if timing is not None:
        yield Block(
            "text",
            f"Seconds per step come from {timing.rounds} rounds in which the arms ran {timing.steps} steps each in "
            "turn, one at a time, from the weights of their best cell: the mean of a stretch without its first "
            f"{timing.skip_steps} steps, and the median over the rounds. Time to a loss is the number of steps at the "
            "first validation that reaches it, times these seconds; validations and checkpoints are not counted. The "
            f"target of each seed is the final loss of {sweep.baseline} with that seed at its best learning rate, and "
            f"what {sweep.baseline} itself needs to reach it counts as 1.",
        )


def results_csv(sweep: Sweep, runs: Sequence[Run]) -> str:
    """Returns one line per cell; a value that does not exist or is not finite is empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        [
            *("grid", "arm", "alpha", "lr", "seed", "pilot", "state", "steps", "tokens", "start_loss"),
            *("final_val_loss", "lowest_val_loss", "last_train_loss", "last_max_logit", "largest_max_logit"),
            *("diverged_at_step", "step_seconds_side_by_side", "folder"),
        ]
    )
    for run in runs:
        cell = run.cell
        alpha = run.alpha if cell.alpha is None else cell.alpha
        losses = [loss for _, _, loss in run.validation]
        logits = [logit for _, logit, _ in run.attention]
        writer.writerow(
            [
                *(cell.grid, cell.arm, "" if alpha is None else f"{alpha:g}", f"{cell.lr:g}", cell.seed),
                *("yes" if cell.is_pilot else "no", run.state),
                *(run.train[-1][:2] if run.train else ("", "")),
                _csv(run.start_loss),
                _csv(run.final_loss),
                _csv(min(losses, default=None)),
                _csv(run.train[-1][2] if run.train else None),
                _csv(logits[-1] if logits else None),
                _csv(max(logits, default=None)),
                run.diverged_at or "",
                _csv(run.step_seconds),
                cell_folder(sweep, cell).name,
            ]
        )
    return stream.getvalue()


def _csv(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.6g}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _spread(values: Sequence[float], form: str) -> str:
    """Returns `4.955 (4.950 to 4.960)`, or one number if both ends are formatted alike."""
    if not values:
        return "-"
    low, high = format(min(values), form), format(max(values), form)
    return f"{mean(values):{form}}" + (f" ({low} to {high})" if low != high else "")
