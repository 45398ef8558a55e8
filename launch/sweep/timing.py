"""Interleaved timing: short stretches of every arm, one after the other, round by round, with nothing else running.

Cells that run concurrently share caches and memory bandwidth, so their own step times are not comparable. A stretch
starts from the weights of the arm's cell if it is finished, so that clipping has as much to do as late in a run.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import write_file
from launch.errors import EXIT_DONE, RunError
from launch.run_folder.observe import read_records
from launch.supervisor.attempt import Attempt
from launch.sweep.cell_run import Signals, launch_of
from launch.sweep.cells import Cell, as_arguments, cell_overrides
from launch.sweep.measures import GridMeasures, mean
from launch.sweep.outcome import LOGS, is_finished
from launch.sweep.spec import Sweep, Timing

_NEVER = 10**9
_FOLDER = "timing"  # holds the run of a stretch; deleted after each


def timing_file(sweep: Sweep) -> Path:
    """Returns the file that holds the measured times."""
    return sweep.folder / "timing.json"


def read_timing(sweep: Sweep) -> dict[str, list[dict[str, float]]]:
    """Returns grid -> for each round, arm -> seconds per step; empty if nothing was timed."""
    try:
        content: dict[str, Any] = json.loads(timing_file(sweep).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content


def time_arms(
    sweep: Sweep, grids: Sequence[GridMeasures], cells: Sequence[Cell], requests: Signals, log: Callable[[str], None]
) -> bool:
    """Times what is not timed yet, and returns whether it was completed without a signal.

    Args:
        cells: The cells of the grids. An arm is timed at its best rate, or at its lowest if it has none.

    Raises:
        RunError: A stretch failed.
    """
    timing = sweep.timing
    if timing is None:
        return True
    done = read_timing(sweep)
    for grid in grids:
        is_wanted = timing.grids is None or grid.name in timing.grids
        if not is_wanted or math.isinf(grid.limit):
            continue
        chosen = _cells_to_time(grid, cells)
        rounds = [known for known in done.get(grid.name, ()) if known.keys() == chosen.keys()]
        while len(rounds) < timing.rounds:
            log(f"timing of {grid.name}: round {len(rounds) + 1} of {timing.rounds}")
            seconds: dict[str, float] = {}
            # Each round begins with a different arm, so that none is always first or last.
            first = len(rounds) % len(chosen)
            for arm in [*list(chosen)[first:], *list(chosen)[:first]]:
                stretch = _time_stretch(sweep, timing, chosen[arm], requests)
                if stretch is None:
                    return False
                seconds[arm] = stretch
            rounds.append(seconds)
            done[grid.name] = rounds
            write_file(timing_file(sweep), json.dumps(done, indent=1).encode())
    return True


def _cells_to_time(grid: GridMeasures, cells: Sequence[Cell]) -> dict[str, Cell]:
    """Returns one cell for each arm that has cells."""
    chosen: dict[str, Cell] = {}
    for arm, measures in grid.arms.items():
        mine = [cell for cell in cells if (cell.grid, cell.arm) == (grid.name, arm) and not cell.waits_for_pilot]
        at_best = [cell for cell in mine if cell.lr == measures.best_rate]
        if mine:
            chosen[arm] = min(at_best or mine, key=lambda cell: (cell.lr, cell.seed))
    return chosen


def _time_stretch(sweep: Sweep, timing: Timing, cell: Cell, requests: Signals) -> float | None:
    """Returns the mean seconds per step of a stretch, or None if stopped.

    The mean and not the median, because the adaptive policy measures only at some steps.
    """
    parent = sweep.folder / _FOLDER
    shutil.rmtree(parent, ignore_errors=True)
    settings: Mapping[str, Any] = {
        "run.dir": str(parent),
        "train.stop_step": timing.steps,
        "validation.every_steps": _NEVER,
        "validation.batches": 1,
        "checkpoint.every_steps": _NEVER,
        "monitor.every_steps": None,
        "run.init_from": str(sweep.folder / cell.name) if is_finished(sweep, cell) else None,
    }
    arguments = [*cell_overrides(sweep, cell), *as_arguments(settings)]
    with (sweep.folder / LOGS / "timing.log").open("ab") as output:
        attempt = Attempt(launch_of(sweep, arguments), lambda message: None, output)
        try:
            attempt.wait(requests)
        finally:
            attempt.kill()
            report = attempt.close()
    if requests:
        return None
    records = read_records(parent / cell.name)
    if report.codes != {EXIT_DONE} or len(records) < timing.steps:
        raise RunError(f"timing of {cell.name}: {report.failure()}; see {sweep.folder / LOGS / 'timing.log'}")
    shutil.rmtree(parent)
    return mean([record["step_seconds"] for record in records[timing.skip_steps :]])
