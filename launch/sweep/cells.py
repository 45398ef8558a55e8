"""Expands a sweep into cells, with their names and configurations, and checks them all before anything runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.load import differences, load_config
from configs.schema import Config
from data.errors import DataError
from launch.errors import RunError
from launch.sweep.spec import Sweep, flatten

# Keys that are set by the data or the start of a run, not by the sweep.
_LATER_KEYS = ("model.vocab_size", "data.eod_id", "run.resume")

Alphas = dict[tuple[str, str], float]  # (grid, arm) -> alpha from the pilot


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        alpha: Chosen or tried by the pilot; None if the arm's own is used, or while the pilot has not chosen.
        waits_for_pilot: Whether alpha is yet to be chosen.
        is_pilot: Whether the cell belongs to a pilot.
    """

    grid: str
    arm: str
    lr: float
    seed: int
    alpha: float | None = None
    waits_for_pilot: bool = False
    is_pilot: bool = False

    @property
    def name(self) -> str:
        """The name of its folder. A pilot and its grid share a folder for cells that agree in everything."""
        alpha = "-a?" if self.waits_for_pilot else "" if self.alpha is None else f"-a{self.alpha:g}"
        return f"{self.grid}-{self.arm}{alpha}-lr{self.lr:g}-s{self.seed}"


def expand(sweep: Sweep) -> list[Cell]:
    """Returns all cells: those of the pilots, then those of the grids, by seed and then by rate."""
    pilots, cells = [], []
    for name, grid in sweep.grids.items():
        piloted = grid.pilot.alphas if grid.pilot else {}
        if grid.pilot:
            pilots += [
                Cell(name, arm, lr, grid.pilot.seed, alpha, is_pilot=True)
                for arm, alphas in piloted.items()
                for alpha in alphas
                for lr in grid.pilot.lrs
            ]
        cells += [
            Cell(name, arm, lr, seed, waits_for_pilot=arm in piloted)
            for seed in grid.seeds
            for lr in grid.lrs
            for arm in sweep.arms_of(name)
        ]
    return pilots + cells


def with_alpha(cell: Cell, alphas: Alphas) -> Cell:
    """Returns the cell with the alpha that its pilot chose. Raises RunError if the pilot is not complete."""
    if not cell.waits_for_pilot:
        return cell
    if (cell.grid, cell.arm) not in alphas:
        raise RunError(f"{cell.name}: the pilot of arm {cell.arm} in grid {cell.grid} is not complete")
    return replace(cell, alpha=alphas[cell.grid, cell.arm], waits_for_pilot=False)


def cell_overrides(sweep: Sweep, cell: Cell) -> list[str]:
    """Returns the arguments of train.py after the base configuration."""
    keys = flatten(sweep.overrides) | flatten(sweep.grids[cell.grid].overrides) | flatten(sweep.arms[cell.arm])
    if cell.alpha is not None:
        keys["qk_control.alpha"] = cell.alpha
    keys |= {
        "optim.lr": cell.lr,
        "run.seed": cell.seed,
        "run.dir": str(sweep.folder),
        "run.name": cell.name,
        "run.resume": "auto",
    }
    return as_arguments(keys)


def as_arguments(keys: Mapping[str, Any]) -> list[str]:
    """Returns `key.sub=value` arguments. The values are JSON, which is valid YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def cell_config(sweep: Sweep, cell: Cell) -> Config:
    """Returns the resolved configuration of a cell. Raises ConfigError."""
    return load_config(sweep.base, cell_overrides(sweep, cell))


def check_cells(sweep: Sweep, cells: Sequence[Cell], with_data: bool = True) -> None:
    """Checks names, configurations, data and existing folders of all cells.

    Args:
        with_data: Whether to check that the shards can be opened, which a report does not need.

    Raises:
        ConfigError: Has one line per problem; a problem that several cells share is reported once.
    """
    problems = list(_shared_names(sweep, cells))
    found: dict[str, list[Cell]] = {}
    configs: list[Config] = []
    for cell in cells:
        try:
            config = cell_config(sweep, _with_any_alpha(sweep, cell))
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(cell)
            continue
        configs.append(config)
        if cell.is_pilot and not config.qk_control.chosen.uses_alpha:
            problem = "has no query/key policy, so a pilot has no alpha to choose"
            found.setdefault(problem, []).append(cell)
        if not config.data.val_sources:
            found.setdefault("data.val_sources: is empty; arms are compared by their validation loss", []).append(cell)
        if sweep.timing is not None and sweep.timing.steps > config.train.steps:
            problem = f"timing.steps: {sweep.timing.steps} is beyond train.steps={config.train.steps}"
            found.setdefault(problem, []).append(cell)
        if not cell.waits_for_pilot:
            for problem in folder_problems(sweep.folder / cell.name, config):
                found.setdefault(problem, []).append(cell)
    problems += [f"{_place(sweep, who, len(cells))}: {problem}" for problem, who in found.items()]
    if with_data:
        problems += _data_problems(configs)
    if problems:
        raise ConfigError(problems)


def folder_problems(folder: Path, config: Config) -> list[str]:
    """Returns one line for each key in which a cell's folder holds another configuration."""
    if not (folder / "config.yaml").exists():
        return []
    try:
        old = load_config(folder / "config.yaml").model_dump(mode="json")
    except ConfigError:
        return ["its folder holds a configuration that cannot be read; move the folder away"]
    return [
        f"its folder holds results of another configuration: {key} was {before} and is now {after}; "
        "give the sweep another name, or move the folder away"
        for key, before, after in differences(old, config.model_dump(mode="json"))
        if key not in _LATER_KEYS
    ]


def _with_any_alpha(sweep: Sweep, cell: Cell) -> Cell:
    pilot = sweep.grids[cell.grid].pilot
    return replace(cell, alpha=pilot.alphas[cell.arm][0]) if pilot and cell.waits_for_pilot else cell


def _shared_names(sweep: Sweep, cells: Sequence[Cell]) -> Iterator[str]:
    for part in ([cell for cell in cells if cell.is_pilot], [cell for cell in cells if not cell.is_pilot]):
        counts = Counter(cell.name for cell in part)
        yield from (
            f"{count} cells have the folder {sweep.folder / name}" for name, count in counts.items() if count > 1
        )


def _place(sweep: Sweep, cells: Sequence[Cell], num_all: int) -> str:
    """Names the cells, arm or grid that a problem of these cells comes from."""
    arms, grids = sorted({cell.arm for cell in cells}), sorted({cell.grid for cell in cells})
    if len(cells) == 1:
        return f"cell {cells[0].name}"
    if len(cells) == num_all:
        return "every cell"
    if len(arms) == 1:
        return f"arms.{arms[0]}"
    if len(grids) == 1 and len(sweep.grids) > 1:
        return f"grids.{grids[0]}"
    return f"{len(cells)} cells (the first: {cells[0].name})"


def _data_problems(configs: Iterable[Config]) -> Iterator[str]:
    from data.source import TokenSource

    paths = {source.path for config in configs for source in config.data.sources}
    paths |= {path for config in configs for path in config.data.val_sources.values()}
    for path in sorted(paths):
        try:
            TokenSource.open(path)
        except DataError as error:
            yield str(error)
