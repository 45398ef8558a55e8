"""The state of each cell according to its files: finished, diverged, failed, begun or waiting."""

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
LOGS = "logs"  # in the sweep's folder: output of the cells, and why they failed


def cell_folder(sweep: Sweep, cell: Cell) -> Path:
    """Returns the folder of a cell's run."""
    return sweep.folder / cell.name


def log_file(sweep: Sweep, cell: Cell) -> Path:
    """Returns the file that holds a cell's output."""
    return sweep.folder / LOGS / f"{cell.name}.log"


def _failure_file(sweep: Sweep, cell: Cell) -> Path:
    return sweep.folder / LOGS / f"{cell.name}.failed"


def state_of(sweep: Sweep, cell: Cell) -> State:
    """Returns the state of a cell."""
    folder = cell_folder(sweep, cell)
    if diverged_step(sweep, cell) is not None:
        return "diverged"
    if is_finished(sweep, cell):
        return "finished"
    if failure(sweep, cell) is not None:
        return "failed"
    return "begun" if (folder / "metrics.jsonl").exists() else "waiting"


def is_finished(sweep: Sweep, cell: Cell) -> bool:
    """Returns whether the run has reached its last step."""
    step = done_step(cell_folder(sweep, cell))
    return step is not None and step >= last_step(sweep, cell)


def last_step(sweep: Sweep, cell: Cell) -> int:
    """Returns the number of steps of a cell, from its folder if there is one, which is faster than merging its keys."""
    path = cell_folder(sweep, cell) / "config.yaml"
    config = load_config(path) if path.exists() else cell_config(sweep, cell)
    return config.train.last_step


def mark_diverged(sweep: Sweep, cell: Cell, step: int) -> None:
    """Records that a run diverged at a step."""
    write_file(cell_folder(sweep, cell) / DIVERGED, json.dumps({"step": step}).encode())


def diverged_step(sweep: Sweep, cell: Cell) -> int | None:
    """Returns the step at which a run diverged, or None."""
    try:
        return int(json.loads((cell_folder(sweep, cell) / DIVERGED).read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return None


def mark_failed(sweep: Sweep, cell: Cell, reason: str) -> None:
    """Records in one line why a cell failed, outside its folder, which may not exist yet."""
    write_file(_failure_file(sweep, cell), reason.encode())


def clear_failure(sweep: Sweep, cell: Cell) -> None:
    """Removes the record of a failure, before a new start."""
    _failure_file(sweep, cell).unlink(missing_ok=True)


def failure(sweep: Sweep, cell: Cell) -> str | None:
    """Returns why a cell failed the last time, or None if it did not."""
    try:
        return _failure_file(sweep, cell).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
