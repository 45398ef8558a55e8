"""What became of each cell, as its folder tells: finished, diverged, failed, begun or waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from configs.load import load_config
from data.files import write_file
from launch.run_folder.observe import done_step
from launch.sweep.cells import Cell, cell_config
from launch.sweep.spec import Sweep

State = Literal["finished", "diverged", "failed", "begun", "waiting"]

DIVERGED = "diverged.json"  # in the cell's folder
LOGS = "logs"  # in the sweep's folder: what the cells printed, and why they failed


def cell_folder(sweep: Sweep, cell: Cell) -> Path:
    """The folder of a cell's run."""
    return sweep.folder / cell.name


def log_file(sweep: Sweep, cell: Cell) -> Path:
    """Where a cell prints."""
    return sweep.folder / LOGS / f"{cell.name}.log"


def _failure_file(sweep: Sweep, cell: Cell) -> Path:
    return sweep.folder / LOGS / f"{cell.name}.failed"


def state_of(sweep: Sweep, cell: Cell) -> State:
    """What became of a cell so far."""
    folder = cell_folder(sweep, cell)
    if diverged_step(sweep, cell) is not None:
        return "diverged"
    if is_finished(sweep, cell):
        return "finished"
    if failure(sweep, cell) is not None:
        return "failed"
    return "begun" if (folder / "metrics.jsonl").exists() else "waiting"


def is_finished(sweep: Sweep, cell: Cell) -> bool:
    """Whether the run has reached its last step."""
    step = done_step(cell_folder(sweep, cell))
    return step is not None and step >= last_step(sweep, cell)


def last_step(sweep: Sweep, cell: Cell) -> int:
    """The number of steps of a cell, from its folder where it has one: that is quicker than merging its keys."""
    path = cell_folder(sweep, cell) / "config.yaml"
    config = load_config(path) if path.exists() else cell_config(sweep, cell)
    return config.train.last_step


def mark_diverged(sweep: Sweep, cell: Cell, step: int) -> None:
    """Records that a run has diverged at a step."""
    write_file(cell_folder(sweep, cell) / DIVERGED, json.dumps({"step": step}).encode())


def diverged_step(sweep: Sweep, cell: Cell) -> int | None:
    """The step at which a run has diverged; None where it has not."""
    try:
        return int(json.loads((cell_folder(sweep, cell) / DIVERGED).read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return None


def mark_failed(sweep: Sweep, cell: Cell, reason: str) -> None:
    """Records in one line why a cell failed. Not in its folder, which a run may not have made yet."""
    write_file(_failure_file(sweep, cell), reason.encode())


def forget_failure(sweep: Sweep, cell: Cell) -> None:
    """Before a new start."""
    _failure_file(sweep, cell).unlink(missing_ok=True)


def failure(sweep: Sweep, cell: Cell) -> str | None:
    """Why a cell failed the last time; None where it did not."""
    try:
        return _failure_file(sweep, cell).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
