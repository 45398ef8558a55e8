"""Real sweeps of tiny runs that are killed, stopped, resumed, diverge or fail, and the errors of sweep files."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from configs.errors import ConfigError
from configs.load import load_config
from launch.run_folder.observe import done_step
from launch.sweep.cells import Cell, check_cells, expand, with_alpha
from launch.sweep.lock import cell_locked
from launch.sweep.outcome import log_file
from launch.sweep.pool import make_slots
from launch.sweep.slurm import array_script
from launch.sweep.spec import load_sweep
from launch.sweep.table import Status, table_lines
from tests.conftest import ROOT, finish, python, read_metrics, start
from tests.launch.helpers.supervised import wait_for_end, wait_for_steps, wait_until

WriteSweep = Callable[..., Path]
STEPS = 150


@pytest.fixture
def write_sweep(tmp_path: Path, tiny_config: Path) -> WriteSweep:
    """Writes a sweep file over the tiny configuration; keyword arguments replace its keys."""

    def write(**changes: Any) -> Path:
        tree: dict[str, Any] = {
            "dir": str(tmp_path / "runs"),
            "base": str(tiny_config),
            "overrides": {"train.steps": STEPS, "optim": {"grad_clip": 0.0}, "validation.every_steps": 50},
            "arms": {"none": {}, "quack": {"qk_control": {"policy": "quack"}}},
            "grids": {"small": {"lrs": [5e-3, 1e3], "seeds": [0]}},
            "timing": None,
        }
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump(tree | changes, sort_keys=False))
        return path

    return write


def sweep_command(path: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "launch.sweep", str(path), *options]


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def rank_below(process: subprocess.Popen[str], cell: str) -> psutil.Process:
    """Returns the process that runs train.py for a cell."""

    def command(child: psutil.Process) -> list[str]:
        try:
            return child.cmdline()
        except psutil.NoSuchProcess:  # another cell's, which has just ended
            return []

    (rank,) = [
        child
        for child in descendants(process)
        if any(part.endswith("train.py") for part in command(child)[1:2])
        and any(cell in part for part in command(child))
    ]
    return rank


@pytest.mark.slow
def test_a_killed_or_stopped_sweep_resumes_and_writes_its_report(write_sweep: WriteSweep, tmp_path: Path) -> None:
    path = write_sweep(timing={"rounds": 1, "steps": 8, "skip_steps": 2})
    folder = tmp_path / "runs/sweep"
    first, second = folder / "small-none-lr0.005-s0", folder / "small-quack-lr0.005-s0"

    # A rank is killed: its cell resumes from its checkpoint. Then the sweep is asked to stop.
    process = start(sweep_command(path, "--processes", "1"))
    wait_for_steps(process, first, 5)
    rank_below(process, first.name).kill()
    wait_for_steps(process, second, 5)
    assert done_step(first) == STEPS
    assert "try 1 of 2 failed: rank 0 was killed or crashed" in (folder / f"logs/{first.name}.log").read_text()
    below = descendants(process)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    assert (stopped.code, stopped.errors) == (75, "")
    assert f"{second.name}: stopped" in stopped.output and "the same command resumes the sweep" in stopped.output
    assert wait_for_end(below) < 1
    begun = len(read_metrics(second))
    assert 5 <= begun < STEPS and done_step(second) is None
    marker = (first / "DONE").stat()

    # The sweep is killed: the processes that it started notice, save and end.
    process = start(sweep_command(path, "--processes", "1"))
    wait_for_steps(process, second, begun + 1)
    below = descendants(process)
    assert len(below) >= 2
    process.kill()
    process.communicate()
    wait_for_end(below)

    finished = python("-m", "launch.sweep", path, "--processes", "2")
    assert finished.code == 0, finished.output + finished.errors
    assert (first / "DONE").stat() == marker, "a finished cell was run again"
    assert [record["step"] for record in read_metrics(second)] == list(range(1, STEPS + 1))
    table = finished.output[finished.output.index("             lr") :].splitlines()
    assert [line.split() for line in table[1:3]] == [["small", arm, "done", "div"] for arm in ("none", "quack")]
    for arm in ("none", "quack"):
        assert json.loads((folder / f"small-{arm}-lr1000-s0/diverged.json").read_text())["step"] >= 1
        assert done_step(folder / f"small-{arm}-lr1000-s0") is None
    timing = json.loads((folder / "timing.json").read_text())
    assert timing.keys() == {"small"} and all(0 < value < 10 for value in timing["small"][0].values())
    assert timing["small"][0].keys() == {"none", "quack"} and not (folder / "timing").exists()
    report = (folder / "report/report.md").read_text()
    assert "0.005 for none; 0.005 for quack" in report.splitlines()[2]
    assert {path.name for path in (folder / "report").iterdir()} >= {"report.html", "results.csv"}

    # The sweep is complete. Other settings are refused for existing results.
    advice = python("-m", "launch.sweep", path, "--recommend")
    assert "small: quack at a base learning rate of 0.005 with alpha 0.1" in advice.output
    changed = write_sweep(tolerance=0.2, overrides={"train.steps": STEPS + 1, "optim": {"grad_clip": 0.0}})
    refused = python("-m", "launch.sweep", changed)
    assert refused.code == 2
    assert f"holds results of another configuration: train.steps was {STEPS} and is now {STEPS + 1}" in refused.errors
    assert all(line.startswith("error: every cell: ") for line in refused.errors.splitlines())
    assert python("-m", "launch.sweep", changed, "--report").errors == refused.errors  # no old results under new names


def test_a_cell_that_fails_twice_is_listed_and_a_diverging_one_is_stopped(
    write_sweep: WriteSweep, tmp_path: Path
) -> None:
    path = write_sweep(
        arms={"none": {}, "broken": {"data.tokenizer": "/nowhere/tokenizer.model"}},
        grids={"small": {"lrs": [0.5], "seeds": [0]}},
        overrides={"train.steps": 100_000, "optim": {"grad_clip": 0.0, "warmup_steps": 200}},
        divergence={"window": 4, "margin": 0.25},
    )
    process = start(sweep_command(path, "--processes", "2"))
    wait_for_steps(process, tmp_path / "runs/sweep/small-none-lr0.5-s0", 1)
    psutil.Process(rank_below(process, "small-none-lr0.5-s0").ppid()).kill()  # the process that supervises the cell
    finished = finish(process)
    assert finished.code == 1, finished.output + finished.errors
    assert "small-none-lr0.5-s0: its process was killed by signal 9; retrying once" in finished.output
    (line,) = finished.errors.splitlines()
    assert line.startswith("error: small-broken-lr0.5-s0: ") and "/nowhere/tokenizer.model" in line
    log = (tmp_path / "runs/sweep/logs/small-broken-lr0.5-s0.log").read_text()
    assert "try 1 of 2 failed" in log and "try 2 of 2 failed" in log
    assert "small-none-lr0.5-s0: diverged (1 of 2 cells done)" in finished.output
    steps = [record["step"] for record in read_metrics(tmp_path / "runs/sweep/small-none-lr0.5-s0")]
    assert 4 <= steps[-1] < 50_000  # by SIGTERM, long before its last step
    report = (tmp_path / "runs/sweep/report/report.md").read_text()
    assert "| small-broken-lr0.5-s0 | failed |" in report


def problems_of(path: Path) -> list[str]:
    try:
        sweep = load_sweep(path)
        check_cells(sweep, expand(sweep))
    except ConfigError as error:
        return list(error.problems)
    return []


def test_every_error_of_a_file_is_one_line(write_sweep: WriteSweep) -> None:
    path = write_sweep(
        arms={"none": {}, "bad name": {}},
        grids={
            "g": {"lrs": [], "seeds": [0, -1], "sedes": [1]},
            "h": {"seeds": [0]},
            "i": {"lrs": 0.1, "seeds": ["one"]},
        },
        baselin="none",
        tolerance="much",
    )
    problems = "\n".join(problems_of(path))
    assert "grids.g.lrs: is empty; expected at least one entry" in problems
    assert "grids.g.seeds.1: -1 is not allowed; expected greater than or equal to 0" in problems
    assert "grids.g.sedes: unknown key; did you mean seeds?" in problems
    assert "grids.h.lrs: is required" in problems
    assert "baselin: unknown key; did you mean baseline?" in problems
    assert "tolerance: 'much' is not allowed; expected a valid number" in problems
    assert "arms.bad name: 'bad name' is not allowed" in problems
    assert "grids.i.lrs: 0.1 is not a list" in problems
    assert "grids.i.seeds.0: 'one' is not allowed; expected a valid integer" in problems
    assert len(problems.splitlines()) == 9


def test_errors_across_the_keys_of_a_file_are_reported(write_sweep: WriteSweep) -> None:
    path = write_sweep(
        arms={"quack": {"run.seed": 3}, "constant": {}},
        grids={
            "g": {"lrs": [0.1], "seeds": [0], "arms": ["quack", "quick"]},
            "h": {"lrs": [0.1], "seeds": [0], "pilot": {"alphas": {"none": [0.1]}, "lrs": [0.1]}},
        },
        overrides={"optim": {"lr": 0.1}},
        timing={"steps": 5, "skip_steps": 5, "grids": ["i"]},
    )
    problems = [problem.removeprefix(f"{path}: ") for problem in problems_of(path)]
    assert problems == [
        "grids.g.arms: 'quick' is not an arm; known: quack, constant",
        "grids.g: has no arm 'none', the baseline; its arms: quack, quick",
        "grids.h: has no arm 'none', the baseline; its arms: quack, constant",
        "grids.h.pilot.alphas: 'none' is not an arm; known: quack, constant",
        "timing.skip_steps: 5 is not below timing.steps=5",
        "timing.grids: 'i' is not a grid; known: g, h",
        "overrides.optim.lr: cannot be set here; it comes from the grid's lrs",
        "arms.quack.run.seed: cannot be set here; it comes from the grid's seeds",
    ]


def test_errors_of_the_cells_are_reported_once(write_sweep: WriteSweep, tmp_path: Path) -> None:
    arms = {"none": {}, "quack": {"qk_control.polcy": "quack"}, "norm": {"qk_control.clip_threshold": 30}}
    grids = {
        "a": {"lrs": [0.1, 0.1], "seeds": [0]},
        "b": {"lrs": [0.1], "seeds": [0], "overrides": {"model.attention.qk_norm": True}},
    }
    problems = problems_of(write_sweep(arms=arms, grids=grids, timing={"steps": STEPS + 1}))
    folder = tmp_path / "runs/sweep"
    assert [f"2 cells have the folder {folder / f'a-{arm}-lr0.1-s0'}" for arm in arms] == problems[:3]
    assert "arms.quack: qk_control.polcy: unknown key; did you mean qk_control.policy?" in problems
    assert sum("polcy" in problem for problem in problems) == 1
    (clash,) = [problem for problem in problems if "has no effect with model.attention.qk_norm" in problem]
    assert clash.startswith("cell b-norm-lr0.1-s0: qk_control.clip_threshold: ")
    assert any(f"timing.steps: {STEPS + 1} is beyond train.steps={STEPS}" in problem for problem in problems)

    (missing,) = problems_of(write_sweep(overrides={"data.sources": [{"path": "nowhere/train"}], "train.steps": STEPS}))
    assert "nowhere/train" in missing
    pilot = {"alphas": {"none": [0.1, 0.3]}, "lrs": [0.1]}
    (no_alpha,) = problems_of(write_sweep(grids={"a": {"lrs": [0.1], "seeds": [0], "pilot": pilot}}))
    assert no_alpha == "arms.none: has no query/key policy, so a pilot has no alpha to choose"
    (no_base,) = problems_of(write_sweep(base="nowhere.yaml"))
    assert no_base == "every cell: nowhere.yaml: no such configuration file"
    (no_validation,) = problems_of(write_sweep(base=str(without_validation(tmp_path)), timing=None))
    assert no_validation.startswith("every cell: data.val_sources: is empty")


def without_validation(folder: Path) -> Path:
    tree = yaml.safe_load((folder / "tiny.yaml").read_text())
    del tree["data"]["val_sources"]
    path = folder / "without.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_pilots_come_first_and_share_their_cells_with_the_grid(write_sweep: WriteSweep) -> None:
    grid = {
        "lrs": [0.01, 0.1],
        "seeds": [0, 1],
        "pilot": {"alphas": {"quack": [0.1, 0.3]}, "lrs": [0.1]},
    }
    path = write_sweep(grids={"g": grid})
    sweep = load_sweep(path)
    cells = expand(sweep)
    assert len(cells) == 2 + 2 * 2 * 2
    assert [cell.is_pilot for cell in cells] == [True] * 2 + [False] * 8
    waiting = [cell for cell in cells if cell.waits_for_pilot]
    assert len(waiting) == 4
    with pytest.raises(RuntimeError, match=r"g-quack-a\?-lr0.01-s0: the pilot of arm quack in grid g is not complete"):
        with_alpha(waiting[0], {})
    chosen = [with_alpha(cell, {("g", "quack"): 0.3}).name for cell in cells if not cell.is_pilot]
    assert len(set(chosen)) == 8
    assert {cell.name for cell in cells if cell.is_pilot} & set(chosen) == {"g-quack-a0.3-lr0.1-s0"}
    finished = python("-m", "launch.sweep", path, "--cell", "5")
    assert finished.code == 1 and finished.errors.startswith("error: g-quack-a?-lr0.1-s0: the pilot of arm quack")
    finished = python("-m", "launch.sweep", path, "--cell", "10")
    assert (finished.code, finished.errors) == (2, "error: --cell 10: the sweep has cells 0 to 9\n")


def test_each_cell_gets_its_share_of_the_machine() -> None:
    assert make_slots(None, 1, 8, []) == [{"OMP_NUM_THREADS": "1"}] * 8
    assert make_slots(2, 1, 8, []) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert make_slots(2, 2, 8, []) == [{"OMP_NUM_THREADS": "2"}] * 2
    assert make_slots(4, 1, 2, []) == [{"OMP_NUM_THREADS": "1"}] * 4
    devices = ["0", "1", "2", "3"]
    assert make_slots(None, 1, 8, devices) == [{"CUDA_VISIBLE_DEVICES": device} for device in devices]
    assert make_slots(None, 2, 8, devices) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert make_slots(1, 2, 8, devices) == [{"CUDA_VISIBLE_DEVICES": "0,1"}]
    with pytest.raises(ValueError, match="6 GPUs are needed, and this node shows 4"):
        make_slots(3, 2, 8, devices)


def test_the_table_has_a_line_for_each_arm() -> None:
    statuses = {
        Cell("g", "quack", 0.1, 0, 0.3, is_pilot=True): Status("finished"),
        Cell("g", "none", 0.01, 1): Status("waiting"),
        Cell("g", "none", 0.01, 0): Status("running", 0.25),
        Cell("g", "none", 0.1, 0): Status("diverged"),
        Cell("g", "quack", 0.1, 0, 0.3): Status("failed"),
    }
    assert table_lines(statuses) == [
        "                         lr 0.01  lr 0.1",
        "g quack pilot alpha 0.3           done",
        "g none                   25% .    div",
        "g quack                           FAIL",
    ]


def test_a_task_of_the_slurm_script_runs_one_cell(write_sweep: WriteSweep, tmp_path: Path) -> None:
    pilot = {"alphas": {"quack": [0.1, 0.3]}, "lrs": [0.1]}
    path = write_sweep(
        grids={"g": {"lrs": [0.1], "seeds": [0, 1], "pilot": pilot}},
        slurm={"options": ["--gpus-per-node=8"], "setup": "export WHERE=here", "max_running": 3},
    )
    sweep = load_sweep(path)
    text = array_script(sweep, str(path), expand(sweep))
    assert text.startswith("#!/usr/bin/env bash\n#SBATCH --job-name=sweep\n") and "#SBATCH --gpus-per-node=8\n" in text
    assert "--array=0-1%3 sweep.sh" in text and "--dependency=afterany:$pilot --array=2-5%3 sweep.sh" in text
    # `python` is a fake that prints its arguments.
    script, fake = tmp_path / "sweep.sh", tmp_path / "bin/python"
    script.write_text(text)
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$WHERE" "$@"\n')
    fake.chmod(0o755)
    for variables, arguments in (({"SLURM_ARRAY_TASK_ID": "3"}, " --cell 3"), ({}, "")):
        environment = {**os.environ, **variables, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
        output = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
        assert output.stdout == f"here -m launch.sweep {path}{arguments}\n"


SHIPPED = (*sorted((ROOT / "configs/sweeps").glob("*.yaml")), ROOT / "tests/gpu/sweep.yaml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_sweeps_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("launch.sweep.cells._data_problems", lambda configs: [])  # the data may be absent
    sweep = load_sweep(path)
    cells = expand(sweep)
    check_cells(sweep, cells)
    assert sweep.name in (path.stem, "gpu-124m-short") and load_config(sweep.base)
    for grid in sweep.grids.values():
        steps = [high / low for low, high in zip(grid.lrs, grid.lrs[1:], strict=False)]
        assert all(math.isclose(step, steps[0], rel_tol=0.15) for step in steps)  # LR sensitivity assumes equal ratios


def test_a_cell_waits_for_the_process_that_still_runs_it(write_sweep: WriteSweep) -> None:
    sweep = load_sweep(write_sweep())
    cell = expand(sweep)[0]
    log_file(sweep, cell).parent.mkdir(parents=True)
    requests: list[int] = []

    def enter(entered: threading.Event) -> None:
        with cell_locked(sweep, cell, requests):
            entered.set()

    later, asked = threading.Event(), threading.Event()
    with cell_locked(sweep, cell, requests):
        threading.Thread(target=enter, args=(later,), daemon=True).start()
        assert not later.wait(1.5)
    assert later.wait(30)
    with cell_locked(sweep, cell, requests):  # a signal ends the wait
        threading.Thread(target=enter, args=(asked,), daemon=True).start()
        requests.append(signal.SIGTERM)
        assert asked.wait(30)


def test_a_second_sweep_in_a_folder_is_refused(write_sweep: WriteSweep, tmp_path: Path) -> None:
    path = write_sweep()
    process = start(sweep_command(path, "--processes", "1"))
    try:
        wait_until((tmp_path / "runs/sweep/sweep.yaml").exists, "the folder", process)
        refused = python("-m", "launch.sweep", path)
        assert refused.code == 1 and "another sweep is running in it" in refused.errors
    finally:
        process.send_signal(signal.SIGTERM)
        assert finish(process).code == 75
