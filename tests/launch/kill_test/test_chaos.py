"""A short `launch.chaos`: kills at random times lose nothing; and the faults that it detects."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import yaml

from configs.load import load_config
from launch.kill_test.comparison import make_folder
from launch.kill_test.killed_run import KilledRun
from launch.kill_test.losses import differences, losses
from launch.kill_test.plans import Pace, make_plans
from tests.conftest import python, read_metrics


@pytest.mark.slow
def test_kills_lose_nothing(tiny_config: Path, tmp_path: Path) -> None:
    settings = ["train.steps=30", "checkpoint.every_steps=4", "optim.warmup_steps=0"]
    finished = python("-m", "launch.chaos", tiny_config, *settings, "--kills", "3", "--seed", "2", timeout=500)
    assert finished.code == 0, finished.output + finished.errors
    assert "all 30 steps have losses bit-identical to the uninterrupted run's" in finished.output
    table = finished.output[finished.output.index("kill  what") :].splitlines()
    assert [line.split()[0] for line in table[1:4]] == ["1", "2", "3"]
    assert "3 kills, " in finished.output
    folder = tmp_path / "runs/tiny-chaos"
    assert [record["step"] for record in read_metrics(folder / "killed")] == list(range(1, 31))


def test_other_numbers_of_ranks_need_fp32(tiny_config: Path) -> None:
    finished = python("-m", "launch.chaos", tiny_config, "train.precision=bf16", "--ranks", "2,1")
    assert finished.code == 2
    assert "agree only with train.precision=fp32" in finished.errors


def test_every_second_kill_is_in_a_save_and_all_are_reached() -> None:
    for seed in range(20):
        plans = make_plans(random.Random(seed), 21, last_step=50, every_steps=10)
        assert [plan.step for plan in plans] == sorted(plan.step for plan in plans)
        assert sum(plan.in_save for plan in plans) == 11
        assert {plan.step for plan in plans if plan.in_save} <= {10, 20, 30, 40}
        assert all(plan.step < 47 for plan in plans)
    assert {plan.step for plan in make_plans(random.Random(0), 4, last_step=8, every_steps=100) if plan.in_save} == {8}


def test_any_difference_of_a_loss_is_reported() -> None:
    expected = losses([{"step": 1, "loss": 2.0, "lr": 1.0}, {"step": 2, "loss": 1.5, "val_loss": 1.75}])
    assert expected == {1: {"loss": 2.0}, 2: {"loss": 1.5, "val_loss": 1.75}}
    assert differences(expected, {1: {"loss": 2.0}}, 0.0) == []
    almost = {2: {"loss": 1.5 * (1 + 2**-52), "val_loss": 1.75}}
    assert differences(expected, almost, 1e-5) == []
    (line,) = differences(expected, almost, 0.0)
    assert line.startswith("step 2: ")
    assert differences(expected, {2: {"loss": 1.5}}, 1.0)  # a validation is missing
    assert differences(expected, {3: {"loss": 1.0}}, 1.0)  # an extra step
    assert differences(expected, {2: {"loss": 1.50002, "val_loss": 1.75}}, 1e-5)


def test_leftovers_and_damage_at_the_end_are_reported(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    for run in (whole, folder):
        (run / "checkpoints").mkdir(parents=True)
    expected = {1: {"loss": 2.0}, 2: {"loss": 1.5}}
    records = "".join(json.dumps({"step": step, **values}) + "\n" for step, values in expected.items())
    (folder / "metrics.jsonl").write_text(records)
    (folder / "DONE").write_text('{"step": 2, "loss": 1.5}')

    def faults() -> list[str]:
        run = KilledRun(folder, expected, 0.0, Pace(1, 1, 1), random.Random(0), io.BytesIO())
        run.check_end(whole)
        return run.faults

    assert faults() == []
    (folder / "checkpoints/step_00000001.partial").mkdir()
    (folder / "config.yaml.tmp").write_text("")
    (line,) = faults()
    assert "step_00000001.partial, config.yaml.tmp" in line
    for run in (whole, folder):
        (run / "checkpoints/step_00000002").mkdir()
    (folder / "metrics.jsonl").write_text(records + records)
    (folder / "DONE").unlink()
    marker, steps, _, damage = faults()
    assert "marker" in marker and "each once" in steps and "manifest.json: is missing" in damage


def test_only_its_own_folder_is_replaced(tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config)
    parent = make_folder(config)
    (parent / "killed").mkdir()
    assert make_folder(config) == parent == tmp_path / "runs/tiny-chaos"
    assert not list(parent.iterdir())
    (parent / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match=r"contains thesis\.txt"):
        make_folder(config)
    assert yaml.safe_load(tiny_config.read_text())["run"]["name"] == "tiny"
