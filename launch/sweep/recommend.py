"""Recommends a base learning rate and alpha from the results of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from configs.schema import QkControlConfig
from launch.sweep.cells import Cell, cell_config
from launch.sweep.findings import compare
from launch.sweep.measures import ArmMeasures, GridMeasures
from launch.sweep.spec import Sweep, flatten


def recommend(sweep: Sweep, grid: GridMeasures) -> str:
    """Returns the recommendation of one grid: the query/key policy with the lowest best loss, as text and as YAML.

    Only policies whose best learning rate is usable are considered.
    """
    candidates = [
        arm for arm in grid.others if arm.usable_range is not None and _section(sweep, grid, arm).chosen.uses_alpha
    ]
    if not candidates:
        return (
            f"{grid.name}: no arm with a query/key policy is usable at its best learning rate, so none is recommended."
        )
    chosen = min(candidates, key=lambda arm: arm.best_mean)
    assert chosen.best_rate is not None
    control = _control(sweep, grid, chosen)
    keys = flatten(sweep.arms[chosen.arm]) | {"optim.lr": chosen.best_rate}
    keys |= {f"qk_control.{key}": value for key, value in control.items()}
    lines = [
        f"{grid.name}: {chosen.arm} at a base learning rate of {chosen.best_rate:g} with alpha {control['alpha']:g}, "
        f"final validation loss {chosen.best_mean:.3f}.",
        _margin(grid, chosen),
        *_alpha_comparison(grid, chosen),
        *_comparisons(grid, chosen),
        "",
        yaml.safe_dump(_as_tree(keys), sort_keys=False).rstrip(),
    ]
    return "\n".join(lines)


def _control(sweep: Sweep, grid: GridMeasures, arm: ArmMeasures) -> dict[str, Any]:
    """Returns the arm's `qk_control`: policy, alpha and every other key that is set."""
    section = _section(sweep, grid, arm)
    return {"policy": section.policy, "alpha": section.alpha} | section.model_dump(mode="json", exclude_unset=True)


def _section(sweep: Sweep, grid: GridMeasures, arm: ArmMeasures) -> QkControlConfig:
    return cell_config(sweep, Cell(grid.name, arm.arm, grid.rates[0], grid.seeds[0], arm.alpha)).qk_control


def _as_tree(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Converts dotted keys to nested sections."""
    tree: dict[str, Any] = {}
    for key, value in sorted(keys.items()):
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        node[leaf] = value
    return tree


def _margin(grid: GridMeasures, arm: ArmMeasures) -> str:
    assert arm.usable_range is not None and arm.best_rate is not None
    low, high = arm.usable_range
    seeds = "every seed that has a result" if arm.num_missing else "every seed"
    around = f"usable from {low:g} to {high:g} (within {grid.tolerance:g} of the grid's best loss with {seeds})"
    if high > arm.best_rate:
        end = ", up to the highest tried" if high == grid.rates[-1] else ""
        return f"Margin: the learning rate may be raised {high / arm.best_rate:.3g} times{end}; {around}."
    if high == grid.rates[-1]:
        return f"Margin: unknown, since this is the highest learning rate tried; {around}."
    lower = [rate for rate in grid.rates if low <= rate < arm.best_rate]
    loss = f" The next lower learning rate, {lower[-1]:g}, is safer." if lower else ""
    above = grid.rates[grid.rates.index(high) + 1]
    if above not in arm.losses:
        return f"Margin: unknown, since the next higher learning rate has no result; {around}.{loss}"
    return f"Margin: none on this grid, since the next higher learning rate is not usable; {around}.{loss}"


def _alpha_comparison(grid: GridMeasures, arm: ArmMeasures) -> list[str]:
    scores = grid.pilot.get(arm.arm, {})
    if len(scores) < 2 or arm.alpha is None:
        return []
    mine = scores[arm.alpha]
    others = "; ".join(
        f"{alpha:g}: {score.lowest - mine.lowest:+.3f} and {score.mean - mine.mean:+.3f}"
        for alpha, score in scores.items()
        if alpha != arm.alpha
    )
    edge = arm.alpha in (min(scores), max(scores))
    end = " The chosen alpha is at the end of the range tried, so one beyond it may be better." if edge else ""
    return [
        "Other alphas in the pilot (one seed), lowest and mean loss over its learning rates minus the chosen one's: "
        f"{others}.{end}"
    ]


def _comparisons(grid: GridMeasures, chosen: ArmMeasures) -> list[str]:
    others = {arm.arm: arm for arm in (grid.arms[grid.baseline], grid.best_arm) if arm.arm != chosen.arm}
    return [
        f"Compared with {arm.arm} at its best, {arm.best_mean:.3f} at {arm.best_rate:g}, its loss is "
        f"{compare(chosen, arm)}."
        for arm in others.values()
        if arm.best_rate is not None
    ]
