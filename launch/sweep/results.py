"""Reads the results of the cells of a sweep from their folders."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from configs.load import load_config
from launch.run_folder.observe import read_records
from launch.sweep.cells import Cell
from launch.sweep.divergence import loss_of
from launch.sweep.outcome import State, cell_folder, diverged_step, state_of
from launch.sweep.spec import Sweep


@dataclass(frozen=True)
class Run:
    """The results of one cell.

    Attributes:
        start_loss: The training loss of the first step, before any update; NaN without records.
        train: (step, tokens so far, loss) of every step.
        validation: (step, tokens, loss) of every validation.
        attention: (step, largest logit, mean |Δlogit| of the step) where it was measured.
        diverged_at: The step at which the run diverged, or None.
        alpha: The `qk_control.alpha` of the run's policy; None if it uses none.
        step_seconds: The median, with other cells running at the same time; NaN without records.
    """

    cell: Cell
    state: State
    start_loss: float = math.nan
    train: list[tuple[int, int, float]] = field(default_factory=list)
    validation: list[tuple[int, int, float]] = field(default_factory=list)
    attention: list[tuple[int, float, float]] = field(default_factory=list)
    diverged_at: int | None = None
    step_seconds: float = math.nan
    alpha: float | None = None

    @property
    def final_loss(self) -> float | None:
        """The last validation loss; infinite for a diverged run, None for one that has not finished."""
        if self.state == "diverged":
            return math.inf
        return self.validation[-1][2] if self.state == "finished" and self.validation else None


def read_run(sweep: Sweep, cell: Cell) -> Run:
    """Reads one cell's folder."""
    state = state_of(sweep, cell)
    records = read_records(cell_folder(sweep, cell)) if state != "waiting" else []
    if not records:
        return Run(cell, state, diverged_at=diverged_step(sweep, cell))
    seconds = sorted(record["step_seconds"] for record in records)
    return Run(
        cell,
        state,
        start_loss=loss_of(records[0]),
        train=[(record["step"], record["tokens"], loss_of(record)) for record in records],
        validation=[
            (record["step"], record["tokens"], _number(record["val_loss"]))
            for record in records
            if "val_loss" in record
        ],
        attention=[
            (record["step"], _number(record["max_logit"]), _number(record["logit_change"]))
            for record in records
            if "max_logit" in record
        ],
        diverged_at=diverged_step(sweep, cell),
        step_seconds=seconds[len(seconds) // 2],
        alpha=_alpha(cell_folder(sweep, cell)),
    )


def read_runs(sweep: Sweep, cells: Iterable[Cell]) -> list[Run]:
    """Reads the folders of many cells."""
    return [read_run(sweep, cell) for cell in cells]


def _alpha(folder: Path) -> float | None:
    control = load_config(folder / "config.yaml").qk_control
    return control.alpha if control.chosen.uses_alpha else None


def _number(value: float | None) -> float:
    """Converts a value of metrics.jsonl, where null stands for a non-finite value."""
    return math.inf if value is None else float(value)
