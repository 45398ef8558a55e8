"""The measures of a sweep against independent references and cases computed by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.sweep.analysis import choose_alphas, measure, pilot_scores
from launch.sweep.cell_run import Signals
from launch.sweep.cells import Cell, expand
from launch.sweep.divergence import divergence_step, nonfinite_step
from launch.sweep.measures import best_rate, first_reach, pilot_score, range_around, sensitivity, usable_rates
from launch.sweep.results import Run
from launch.sweep.spec import Divergence, Sweep, flatten
from launch.sweep.timing import read_timing, time_arms

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
loss_values = st.one_of(st.floats(2.0, 9.0), st.just(math.inf))


def reference_divergence(losses: list[float], window: int, margin: float) -> int | None:
    """Applies the divergence rule literally."""
    for step in range(1, len(losses) + 1):
        if not math.isfinite(losses[step - 1]):
            return step
        means = [np.mean(losses[end - window : end]) for end in range(window, step + 1)]
        if means and means[-1] > min([losses[0], *means]) + margin:
            return step
    return None


@given(
    st.lists(st.one_of(st.integers(0, 40).map(lambda x: x / 4), st.just(math.inf)), max_size=40),
    st.integers(1, 8),
    st.sampled_from([0.26, 1.01, 3.1]),  # no mean of quarters over a window equals such a margin
)
def test_divergence_matches_the_literal_rule(losses: list[float], window: int, margin: float) -> None:
    rule = Divergence(window=window, margin=margin)
    assert divergence_step(losses, rule) == reference_divergence(losses, window, margin)


def test_divergence_in_cases_computed_by_hand() -> None:
    rule = Divergence(window=2, margin=1.0)
    assert divergence_step([8.0, 6.0, 5.0, 5.5], rule) is None
    assert divergence_step([8.0, 6.0, 5.0, 7.0, 7.0], rule) == 5  # means 7, 5.5, 6, 7; 7 > 5.5 + 1
    assert divergence_step([8.0, 9.5, 9.5], rule) == 3  # above the start: 9.5 > 8 + 1
    assert divergence_step([8.0, math.nan], rule) == 2
    assert divergence_step([8.0, 6.3, 6.3, 6.3], rule) is None  # a plateau is not divergence
    assert divergence_step([], rule) is None


def test_the_nonfinite_step_is_read_from_the_last_line_of_a_run() -> None:
    assert nonfinite_step("rank 0: non-finite loss at step 17 on rank 0; trained on a.bin document 3") == 17
    assert nonfinite_step("non-finite gradients at step 2 (the loss was 3.0)") == 2
    assert nonfinite_step("rank 0 was killed or crashed") is None


@given(st.lists(loss_values, min_size=5, max_size=5), st.floats(2.0, 9.0))
def test_the_usable_range_is_the_longest_contiguous_one_around_the_best(values: list[float], limit: float) -> None:
    losses = {rate: {0: value} for rate, value in zip(RATES, values, strict=True)}
    best, usable = best_rate(losses), usable_rates(losses, limit)
    assert usable == [rate for rate, value in zip(RATES, values, strict=True) if value <= limit]
    if best is None:
        assert all(math.isinf(value) for value in values)
        return
    assert losses[best][0] == min(values)
    found = range_around(best, usable, RATES)
    stretches = [
        (RATES[low], RATES[high])
        for low in range(5)
        for high in range(low, 5)
        if RATES[low] <= best <= RATES[high] and all(value <= limit for value in values[low : high + 1])
    ]
    assert found == max(stretches, key=lambda ends: ends[1] / ends[0], default=None)


def test_a_usable_rate_is_usable_with_every_seed() -> None:
    losses = {1e-3: {0: 5.0, 1: 5.05}, 3e-3: {0: 4.9, 1: 5.11}, 1e-2: {0: 4.0, 1: math.inf}}
    assert usable_rates(losses, 5.1) == [1e-3]
    assert best_rate(losses) == 3e-3  # 5.005 < 5.025; a diverged seed rules a rate out


@given(st.lists(loss_values, min_size=1, max_size=8), st.floats(3.0, 9.0))
def test_sensitivity_is_the_mean_excess_of_capped_losses(values: list[float], start: float) -> None:
    capped = np.minimum(np.array(values), start)
    expected = capped.mean() - capped.min()
    assert sensitivity(dict(enumerate(values)), start) == pytest.approx(expected, abs=1e-12)
    finite = np.where(np.isfinite(values), values, start)
    assert pilot_score(values, start) == (finite.min(), pytest.approx(finite.mean()))


def test_a_loss_is_reached_at_the_first_validation_not_above_it() -> None:
    curve = [(10, 100, 5.0), (20, 200, 4.0), (30, 300, 4.5)]
    assert first_reach(curve, 4.5) == (20, 200)
    assert first_reach(curve, 4.0) == (20, 200)
    assert first_reach(curve, 3.9) is None


def make_sweep(**changes: object) -> Sweep:
    tree = {
        "name": "made-up",
        "base": "none.yaml",
        "arms": {"none": {}, "quack": {"qk_control.policy": "quack"}},
        "grids": {"g": {"lrs": [0.01, 0.1], "seeds": [0, 1]}},
    }
    return Sweep.model_validate(tree | changes)


@given(
    st.lists(st.sampled_from(["a", "b", "a-lr1", "a-lr1-s0"]), min_size=1, unique=True),
    st.lists(st.sampled_from([1e-4, 3e-4, 1e-3, 0.1, 1.0]), min_size=1, unique=True),
    st.lists(st.integers(0, 3), min_size=1, unique=True),
)
def test_a_grid_is_the_product_and_each_cell_has_a_folder_of_its_own(
    arms: list[str], lrs: list[float], seeds: list[int]
) -> None:
    sweep = make_sweep(arms={arm: {} for arm in arms}, grids={"g": {"lrs": lrs, "seeds": seeds}})
    cells = expand(sweep)
    places = {(cell.arm, cell.lr, cell.seed) for cell in cells}
    assert places == set(itertools.product(arms, lrs, seeds)) and len(cells) == len(places)
    assert len({cell.name for cell in cells}) == len(cells)


def test_validation_data_of_a_sweep_replace_those_of_the_base() -> None:
    overrides = {"data": {"val_sources": {"mine": "a/val"}}, "optim": {"muon.adamw_lr": 0.1, "warmup_steps": 3}}
    assert flatten(overrides) == {
        "data.val_sources": {"mine": "a/val"},
        "optim.muon.adamw_lr": 0.1,
        "optim.warmup_steps": 3,
    }
    assert flatten({"data.val_sources.mine": "a/val"}) == {"data.val_sources.mine": "a/val"}  # added to the base's


def make_run(arm: str, lr: float, seed: int, curve: list[float], state: str = "finished", **cell: object) -> Run:
    """Returns a run with the given validation losses, 10 steps and 100 tokens apart."""
    validation = [(10 * number, 100 * number, loss) for number, loss in enumerate(curve, start=1)]
    place = Cell("g", arm, lr, seed, **cell)  # type: ignore[arg-type]
    return Run(place, state, start_loss=8.0, validation=validation)  # type: ignore[arg-type]


def made_up_runs() -> list[Run]:
    return [
        make_run("none", 0.01, 0, [6.0, 5.5, 5.2, 5.0]),
        make_run("none", 0.01, 1, [6.0, 5.5, 5.1, 5.18]),
        make_run("none", 0.1, 0, [7.0, 6.0, 6.0, 6.0]),
        make_run("none", 0.1, 1, [7.0], "diverged"),
        make_run("quack", 0.01, 0, [6.0, 5.5, 5.2, 5.05], alpha=0.1),
        make_run("quack", 0.01, 1, [6.0, 5.5, 5.2, 5.15], alpha=0.1),
        make_run("quack", 0.1, 0, [6.0, 5.0, 4.9, 4.95], alpha=0.1),
        make_run("quack", 0.1, 1, [6.0, 5.3, 5.1, 5.0], alpha=0.1),
    ]


def test_measures_of_a_grid_match_values_computed_by_hand() -> None:
    rounds = [{"none": 1.0, "quack": 1.1}, {"none": 2.0, "quack": 2.5}, {"none": 1.0, "quack": 1.2}]
    (grid,) = measure(make_sweep(), made_up_runs(), {"g": rounds})
    none, quack = grid.arms["none"], grid.arms["quack"]
    assert grid.limit == pytest.approx(4.975 + 0.1)  # quack at 0.1: (4.95 + 5.0) / 2
    assert grid.best_arm is quack
    assert (none.best_rate, none.best_mean, none.num_diverged) == (0.01, pytest.approx(5.09), 1)
    assert none.highest is None  # seed 1 ends at 5.18
    assert none.highest_by_seed == {0: 0.01, 1: None}
    assert none.own_highest == 0.01  # 5.18 is within 0.1 of 5.09
    assert none.sensitivity == {0: pytest.approx(0.5), 1: pytest.approx((8.0 - 5.18) / 2)}
    assert (quack.highest, quack.usable_range) == (0.1, (0.1, 0.1))
    # none itself: 5.0 at step 40 of seed 0; 5.1 at step 30 of seed 1, which is below its final 5.18.
    assert quack.reach is not None and quack.reach.rate == 0.1
    assert quack.reach.tokens == {0: pytest.approx(200 / 400), 1: pytest.approx(300 / 300)}
    assert quack.pace is not None
    assert (quack.pace.step_seconds, quack.pace.overhead) == (1.2, pytest.approx(0.2))  # medians
    assert (quack.pace.low, quack.pace.high) == (pytest.approx(0.1), pytest.approx(0.25))
    assert quack.reach.seconds == {0: pytest.approx(0.5 * 1.2), 1: pytest.approx(1.2)}
    assert quack.reach.spacing == pytest.approx(100 / 300)  # of seed 1


def test_each_timing_round_begins_with_a_different_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_sweep(dir=str(tmp_path), timing={"rounds": 3})
    sweep.folder.mkdir()
    runs, timed = made_up_runs(), []
    monkeypatch.setattr("launch.sweep.timing._time_stretch", lambda *args: timed.append(args[2].arm) or len(timed))
    assert time_arms(sweep, measure(sweep, runs, {}), [run.cell for run in runs], Signals(), lambda text: None)
    assert timed == ["none", "quack", "quack", "none", "none", "quack"]
    assert read_timing(sweep) == {"g": [{"none": 1, "quack": 2}, {"quack": 3, "none": 4}, {"none": 5, "quack": 6}]}


def test_unfinished_cells_are_excluded_and_counted() -> None:
    runs = made_up_runs()
    runs[6] = replace(runs[6], state="failed")
    (grid,) = measure(make_sweep(), runs, {})
    assert grid.arms["quack"].num_missing == 1
    assert grid.arms["quack"].losses[0.1] == {1: 5.0}
    assert grid.arms["quack"].pace is None
    assert measure(make_sweep(), [replace(run, state="waiting") for run in runs], {})[0].limit == math.inf


def test_a_complete_pilot_chooses_the_lowest_mean_among_alphas_near_the_lowest_loss() -> None:
    grids = {
        "g": {
            "lrs": [0.01],
            "seeds": [0],
            "pilot": {"alphas": {"quack": [0.1, 0.3]}, "lrs": [0.01, 0.1]},
        }
    }
    sweep = make_sweep(grids=grids)
    runs = [
        make_run("quack", 0.01, 0, [5.0], alpha=0.3, is_pilot=True),
        make_run("quack", 0.1, 0, [6.0], "diverged", alpha=0.3, is_pilot=True),
        make_run("quack", 0.01, 0, [5.5], alpha=0.1, is_pilot=True),
        make_run("quack", 0.1, 0, [5.6], alpha=0.1, is_pilot=True),
    ]
    start_loss = 8.0
    assert pilot_scores(sweep, runs) == {
        ("g", "quack"): {0.1: (5.5, pytest.approx(5.55)), 0.3: (5.0, (5.0 + start_loss) / 2)}
    }
    assert choose_alphas(sweep, runs) == {("g", "quack"): 0.3}
    close = [make_run("quack", 0.01, 0, [5.05], alpha=0.1, is_pilot=True) if run is runs[2] else run for run in runs]
    assert choose_alphas(sweep, close) == {("g", "quack"): 0.1}  # as good within the tolerance, and better on average
    assert pilot_scores(sweep, [*runs[:3], replace(runs[3], state="failed")]) == {}
