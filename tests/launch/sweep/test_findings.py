"""The sentences of a sweep's report claim only what synthetic results show."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from launch.sweep.analysis import measure
from launch.sweep.cells import Cell
from launch.sweep.figures import draw_losses
from launch.sweep.findings import describe_grid
from launch.sweep.measures import GridMeasures, PilotScore
from launch.sweep.recommend import recommend
from launch.sweep.report import write_report
from launch.sweep.results import Run
from launch.sweep.spec import Sweep

RATES = (0.001, 0.01, 0.1)
Table = dict[str, dict[float, tuple[float, ...]]]  # arm -> rate -> final loss of each seed

WIN: Table = {
    "none": {0.001: (5.00, 5.02), 0.01: (5.50, 5.60), 0.1: (math.inf, 6.5)},
    "quack": {0.001: (5.20, 5.21), 0.01: (4.80, 4.82), 0.1: (4.85, 4.86)},
}


def make_sweep(folder: Path, tiny_config: Path, table: Table) -> Sweep:
    tree = {
        "name": "made-up",
        "dir": str(folder),
        "base": str(tiny_config),
        "arms": {"none": {}, "quack": {"qk_control.policy": "quack"}, "norm": {"model.attention.qk_norm": True}},
        "grids": {"g": {"arms": list(table), "lrs": list(RATES), "seeds": list(range(len(table["none"][0.001])))}},
    }
    return Sweep.model_validate(tree)


def make_runs(table: Table) -> list[Run]:
    """Losses fall from 8 to their end in 10 steps, 90 % of the way in the first three."""
    return [
        Run(
            Cell("g", arm, rate, seed),
            "diverged" if math.isinf(end) else "finished",
            start_loss=8.0,
            train=[(step, 100 * step, 8.0) for step in range(1, 11)],
            validation=[
                (step, 100 * step, end + (8 - end) * 0.5 ** (step if step < 10 else 99)) for step in range(1, 11)
            ],
            attention=[(5, 3.0, 0.1), (10, 30.0, 0.2)],
            diverged_at=3 if math.isinf(end) else None,
        )
        for arm, by_rate in table.items()
        for rate, ends in by_rate.items()
        for seed, end in enumerate(ends)
    ]


def measured(folder: Path, config: Path, table: Table, overhead: float | None = None) -> tuple[Sweep, GridMeasures]:
    sweep = make_sweep(folder, config, table)
    rounds = [] if overhead is None else [{"none": 1.0, "quack": 1.0 + overhead}]
    (grid,) = measure(sweep, make_runs(table), {"g": rounds})
    return sweep, grid


def findings(folder: Path, config: Path, table: Table, overhead: float | None = None) -> str:
    return describe_grid(measured(folder, config, table, overhead)[1])


def test_a_clear_gain_is_stated(tmp_path: Path, tiny_config: Path) -> None:
    table = {**WIN, "none": {**WIN["none"], 0.001: (4.88, 4.90)}}
    text = findings(tmp_path, tiny_config, table, overhead=0.05)
    assert (
        "within 0.1 of 4.810, the lowest mean of any arm, for every seed): 0.001 for none; 0.1 for quack (100 times "
        "that of none, the highest tried)." in text
    )
    assert (
        "Adjacent learning rates differ by a factor of 10; the highest usable ones are known only to that resolution"
        in text
    )
    assert "For each seed alone, the highest usable learning rate of quack is 100 times that of none." in text
    assert "Best mean final loss of none: 4.890 (seeds 4.880 to 4.900) at 0.001." in text
    assert (
        "Best mean final loss of quack: 4.810 (seeds 4.800 to 4.820) at 0.01, 0.080 lower than that of none, "
        "and the ranges of the seeds do not overlap." in text
    )
    assert re.search(r"quack therefore saves [\d.]+( to [\d.]+)? % of the seconds with each seed", text)
    assert "Ranges are over 2 seeds, which is not a test of significance" in text
    assert "are disjoint by chance one time in 3" in text


def test_fewer_tokens_but_more_seconds_is_no_saving(tmp_path: Path, tiny_config: Path) -> None:
    text = findings(tmp_path, tiny_config, WIN)
    assert re.search(r"quack therefore saves [\d.]+( to [\d.]+)? % of the tokens with each seed", text)
    text = findings(tmp_path, tiny_config, WIN, overhead=3.0)
    assert "saves" not in text.replace("No arm saves", "")
    assert "No arm saves seconds: even the fastest, quack, needs more than none." in text


def test_a_difference_within_the_spread_of_the_seeds_is_not_distinguishable(tmp_path: Path, tiny_config: Path) -> None:
    table: Table = {
        "none": {0.001: (5.00, 5.04), 0.01: (5.05, 5.06), 0.1: (6.0, 6.0)},
        "quack": {0.001: (5.20, 5.21), 0.01: (5.01, 5.02), 0.1: (6.0, 6.0)},
    }
    text = findings(tmp_path, tiny_config, table, overhead=0.0)
    assert "at 0.01, 0.005 lower than that of none, but not distinguishable: the ranges of the seeds overlap." in text
    assert "0.01 for none; 0.01 for quack. " in text and "is equal to that of none, so no gain is observed" in text
    assert "times" not in text
    assert (
        "These arms reached the best final loss of none with some seeds only: quack (1 of 2)." in text
    )  # 5.01 is not 5.00
    assert "saves" not in text


def test_a_worse_arm_is_reported_as_worse(tmp_path: Path, tiny_config: Path) -> None:
    table = {"none": WIN["quack"], "quack": WIN["none"]}
    text = findings(tmp_path, tiny_config, table, overhead=0.0)
    assert "0.1 for none (the highest tried); no usable rate for quack." in text
    assert "0.200 higher than that of none, and the ranges of the seeds do not overlap" in text
    assert "These arms did not reach the best final loss of none at any learning rate: quack." in text
    assert "saves" not in text and "lower" not in text


def test_with_one_seed_nothing_is_known_about_chance(tmp_path: Path, tiny_config: Path) -> None:
    table = {arm: {rate: ends[:1] for rate, ends in by_rate.items()} for arm, by_rate in WIN.items()}
    text = findings(tmp_path, tiny_config, table)
    assert "which may be chance with a single seed" in text
    assert "There is only one seed, so nothing is known about chance." in text
    assert "each seed alone" not in text and "overlap" not in text


def test_a_baseline_without_a_usable_rate_gives_no_factor(tmp_path: Path, tiny_config: Path) -> None:
    text = findings(tmp_path, tiny_config, WIN)
    assert "no usable rate for none; 0.1 for quack (the highest tried)." in text
    assert "none has no usable learning rate by this criterion (its best mean loss is 5.010, at 0.001)" in text
    assert "times" not in text


def test_no_limit_is_stated_for_a_baseline_usable_at_every_rate(tmp_path: Path, tiny_config: Path) -> None:
    text = findings(tmp_path, tiny_config, {"none": WIN["quack"], "quack": WIN["quack"]})
    assert "none is usable up to the highest learning rate tried, so this grid shows no limit for it." in text
    assert "times" not in text


def test_nothing_is_compared_if_everything_diverged(tmp_path: Path, tiny_config: Path) -> None:
    table = {arm: dict.fromkeys(RATES, (math.inf, 5.0)) for arm in WIN}
    sweep, grid = measured(tmp_path, tiny_config, table, overhead=0.0)
    assert describe_grid(grid) == (
        "Every arm diverged at every learning rate with at least one seed, so there is nothing to compare."
    )
    assert "none is recommended" in recommend(sweep, grid)
    write_report(sweep, [grid], make_runs(table))  # without plots
    assert not list(sweep.folder.glob("report/*.png"))


def test_missing_cells_are_counted(tmp_path: Path, tiny_config: Path) -> None:
    sweep = make_sweep(tmp_path, tiny_config, WIN)
    runs = make_runs(WIN)
    (grid,) = measure(sweep, [replace(runs[0], state="failed"), *runs[1:]], {})
    text = describe_grid(grid)
    assert "Cells without a result are excluded throughout (1 of none)." in text
    assert "for every seed that has a result)" in text
    # What is left of none at its best rate is one seed, which has no range.
    assert "0.210 lower than that of none, which may be chance with a single seed." in text
    assert not grid.arms["none"].sensitivity.keys() & {0}
    (grid,) = measure(sweep, [replace(run, state="waiting") for run in runs], {})
    assert describe_grid(grid) == "No run has ended yet, so there is nothing to compare."


@pytest.mark.parametrize("arm", ["none", "quack"])
def test_an_arm_without_results_did_not_diverge(tmp_path: Path, tiny_config: Path, arm: str) -> None:
    runs = [replace(run, state="waiting") if run.cell.arm == arm else run for run in make_runs(WIN)]
    (grid,) = measure(make_sweep(tmp_path, tiny_config, WIN), runs, {})
    text = describe_grid(grid)
    assert f"no result for {arm}" in text and f"{arm} has no result." in text and f"(6 of {arm})" in text
    assert "diverged" not in text and "did not reach" not in text and "times" not in text


def test_an_arm_that_diverged_everywhere_differs_from_one_that_lost_a_seed(tmp_path: Path, tiny_config: Path) -> None:
    table: Table = {
        "none": dict.fromkeys(RATES, (math.inf, math.inf)),
        "quack": WIN["quack"],
        "norm": dict.fromkeys(RATES, (math.inf, 5.0)),
    }
    _, grid = measured(tmp_path, tiny_config, table, overhead=0.0)
    text = describe_grid(grid)
    assert "none diverged at every learning rate; norm diverged at every learning rate with at least one seed." in text
    assert "so no factor can be stated" in text and "none has no best loss, so no time to reach it is stated." in text
    assert grid.arms["none"].sensitivity == {} and grid.arms["norm"].sensitivity.keys() == {1}


def test_an_unusable_rate_below_the_highest_usable_one_is_reported(tmp_path: Path, tiny_config: Path) -> None:
    table: Table = {
        "none": {0.001: (4.85, 4.86), 0.01: (6.0, 6.0), 0.1: (6.0, 6.0)},
        "quack": {0.001: (4.8, 4.8), 0.01: (6.0, 6.0), 0.1: (4.85, 4.86)},
    }
    text = findings(tmp_path, tiny_config, table)
    assert (
        "0.1 for quack (100 times that of none, the highest tried). However, quack is not usable at every lower "
        "learning rate: it is not usable at 0.01." in text
    )


def test_a_saving_within_the_noise_of_its_timing_is_not_claimed(tmp_path: Path, tiny_config: Path) -> None:
    sweep = make_sweep(tmp_path, tiny_config, WIN)
    steady, noisy = [{"none": 1.0, "quack": 1.1}] * 3, [{"none": 1.0, "quack": 1.0 + extra} for extra in (-1, 0.1, 3)]
    noisy[0]["quack"] = 0.5
    texts = [describe_grid(measure(sweep, make_runs(WIN), {"g": rounds})[0]) for rounds in (steady, noisy)]
    assert re.search(r"quack therefore saves [\d.]+( to [\d.]+)? % of the seconds with each seed", texts[0])
    assert "No saving of seconds is shown" in texts[1]


def test_the_recommendation_states_learning_rate_alpha_and_margin(tmp_path: Path, tiny_config: Path) -> None:
    text = recommend(*measured(tmp_path, tiny_config, WIN))
    assert "g: quack at a base learning rate of 0.01 with alpha 0.1, final validation loss 4.810." in text
    assert "the learning rate may be raised 10 times, up to the highest tried" in text
    assert (
        "Compared with none at its best, 5.010 at 0.001, its loss is 0.200 lower than that of none, and the ranges"
        in text
    )
    advice = yaml.safe_load(text.partition("\n\n")[2])
    assert advice == {"optim": {"lr": 0.01}, "qk_control": {"policy": "quack", "alpha": 0.1}}


def test_the_recommendation_compares_alphas_by_the_scores_of_the_pilot(tmp_path: Path, tiny_config: Path) -> None:
    sweep, grid = measured(tmp_path, tiny_config, WIN)
    scores = {0.1: PilotScore(4.82, 4.9), 0.3: PilotScore(4.8, 5.2)}
    arms = {**grid.arms, "quack": replace(grid.arms["quack"], alpha=0.1)}
    text = recommend(sweep, replace(grid, arms=arms, pilot={"quack": scores}))
    assert "over its learning rates minus the chosen one's: 0.3: -0.020 and +0.300. The chosen alpha is at" in text


def test_the_recommendation_states_better_arms_and_the_edge_of_the_usable_range(
    tmp_path: Path, tiny_config: Path
) -> None:
    table: Table = {
        "none": {0.001: (5.00, 5.02), 0.01: (5.50, 5.60), 0.1: (6.5, 6.5)},
        "quack": {0.001: (4.95, 4.96), 0.01: (4.90, 4.92), 0.1: (6.5, 6.5)},
        "norm": {0.001: (5.00, 5.00), 0.01: (4.85, 4.86), 0.1: (4.85, 4.95)},
    }
    text = recommend(*measured(tmp_path, tiny_config, table))
    assert (
        "Margin: none on this grid, since the next higher learning rate is not usable; usable from 0.01 to 0.01" in text
    )
    assert (
        "Compared with norm at its best, 4.855 at 0.01, its loss is 0.055 higher than that of norm, and the ranges"
        in text
    )


def test_the_recommendation_contains_every_key_of_the_arm(tmp_path: Path, tiny_config: Path) -> None:
    sweep = make_sweep(tmp_path, tiny_config, WIN)
    arms = {
        **sweep.arms,
        "quack": {"qk_control": {"policy": "quack"}, "model.attention.qk_norm": True, "model.dim": 64},
    }
    sweep = sweep.model_copy(update={"arms": arms})
    (grid,) = measure(sweep, make_runs(WIN), {})
    assert yaml.safe_load(recommend(sweep, grid).partition("\n\n")[2]) == {
        "model": {"attention": {"qk_norm": True}, "dim": 64},
        "optim": {"lr": 0.01},
        "qk_control": {"policy": "quack", "alpha": 0.1},
    }


def test_no_line_is_drawn_across_a_rate_without_a_mean(tmp_path: Path, tiny_config: Path) -> None:
    table: Table = {**WIN, "none": {0.001: (5.0, 5.0), 0.01: (math.inf, 5.0), 0.1: (5.1, 5.1)}}
    _, grid = measured(tmp_path, tiny_config, table)
    figure = Figure()
    draw_losses(figure, grid)
    lines = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
    heights = np.asarray(lines["none"].get_ydata())
    assert np.isnan(heights).tolist() == [False, True, False]
    low, high = figure.axes[0].get_ylim()
    assert low < min(4.8, grid.limit) and high > grid.limit


@pytest.mark.parametrize("overhead", [None, 0.1])
def test_the_report_contains_its_plots_and_results(tmp_path: Path, tiny_config: Path, overhead: float | None) -> None:
    sweep, grid = measured(tmp_path, tiny_config, WIN, overhead)
    folder = write_report(sweep, [grid], make_runs(WIN))
    text, page = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    assert text.splitlines()[2] == describe_grid(grid)
    figures = {path.name for path in folder.glob("*.png")}
    expected = {"g_loss_vs_lr.png", "g_curves.png", "g_logits.png", "g_reach.png"}
    assert figures == expected | ({"g_overhead.png"} if overhead else set())
    for name in figures:
        assert f"({name})" in text and f'src="{name}"' in page
    rows = (folder / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 12
    (diverged,) = [row for row in rows if row.startswith("g,none,,0.1,0,")]
    assert diverged.split(",")[6] == "diverged" and diverged.split(",")[10] == ""  # a diverged run has no final loss
