"""A run that stops and resumes in a new process has bit-identical losses, at every ZeRO stage and precision.

With Muon too, whose state is another one; and its runs go on at other stages and numbers of ranks.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.checkpoint.files import CheckpointReader, find_checkpoint
from tests.conftest import read_metrics

STAGES_AND_PRECISIONS = list(itertools.product((0, 1, 2, 3), ("fp32", "bf16")))


def overrides(name: str, stage: int, precision: str, *more: str) -> list[str]:
    result = [f"run.name={name}", f"deepspeed.zero_stage={stage}", f"train.precision={precision}", *more]
    if stage == 3:  # the default keeps all parameters of so small a model whole
        result.append("deepspeed.overrides.zero_optimization.stage3_param_persistence_threshold=64")
    return result


def losses(run_folder: Path) -> list[tuple[Any, ...]]:
    return [(record["step"], record["loss"], record.get("val_loss")) for record in read_metrics(run_folder)]


@pytest.mark.parametrize(("num_ranks", "optimizer"), [(1, "adamw"), (2, "adamw"), (2, "muon")])
def test_resumed_losses_are_bit_identical(
    num_ranks: int, optimizer: str, tiny_config: Path, tmp_path: Path, run_cases: Any
) -> None:
    whole, first, second = [], [], []
    for stage, precision in STAGES_AND_PRECISIONS:
        name, chosen = f"{stage}_{precision}", f"optim.name={optimizer}"
        whole.append((tiny_config, overrides(f"whole_{name}", stage, precision, chosen)))
        first.append((tiny_config, overrides(f"parts_{name}", stage, precision, chosen, "train.stop_step=3")))
        second.append((tiny_config, overrides(f"parts_{name}", stage, precision, chosen)))
    assert run_cases(num_ranks, whole + first) == [[0] * 16] * num_ranks
    assert run_cases(num_ranks, second) == [[0] * 8] * num_ranks

    by_case = {}
    for stage, precision in STAGES_AND_PRECISIONS:
        name = f"{stage}_{precision}"
        uninterrupted = losses(tmp_path / "runs" / f"whole_{name}")
        assert [step for step, _, _ in uninterrupted] == [1, 2, 3, 4, 5, 6]
        assert losses(tmp_path / "runs" / f"parts_{name}") == uninterrupted, name
        by_case[stage, precision] = uninterrupted
    for stage, precision in STAGES_AND_PRECISIONS:
        tolerance = 1e-5 if precision == "fp32" else 5e-3
        for ours, reference in zip(by_case[stage, precision], by_case[1, "fp32"], strict=True):
            assert ours[1] == pytest.approx(reference[1], rel=tolerance), (stage, precision)


def test_muon_goes_on_on_other_ranks_and_stages(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    """Two steps each on one, two and three ranks, at three stages, give the weights of one whole run.

    AdamW cannot take the checkpoint over, but its weights can start a run of AdamW.
    """
    settings = ["optim.name=muon", "optim.muon.per_head=true", "train.global_batch_tokens=384"]
    stages = {"up": (0, 1, 3), "down": (3, 2, 0), "flat": (1, 1, 1)}

    def part(name: str, index: int) -> tuple[Path, list[str]]:
        return tiny_config, overrides(name, stages[name][index], "fp32", *settings, f"train.stop_step={2 * index + 2}")

    for index, num_ranks in enumerate((1, 2, 3)):
        cases = [part(name, index) for name in stages]
        if index == 0:
            cases.append((tiny_config, overrides("whole", 1, "fp32", *settings)))
        outcomes = run_cases(num_ranks, cases)
        assert outcomes == [[0] * len(cases)] * num_ranks, outcomes

    expected = final_tensors(tmp_path / "runs/whole")
    assert {key.split("/")[0] for key in expected} == {"master", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    for name in stages:
        for ours, reference in zip(losses(tmp_path / f"runs/{name}"), losses(tmp_path / "runs/whole"), strict=True):
            assert ours[1] == pytest.approx(reference[1], rel=1e-5), name
        found = final_tensors(tmp_path / f"runs/{name}")
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            assert (tensor - expected[key]).norm() <= 1e-3 * expected[key].norm(), (name, key)

    adamw = [value for value in settings if "muon" not in value]
    goes_on = overrides("flat", 1, "fp32", *adamw, "optim.name=adamw")
    starts_anew = overrides("anew", 1, "fp32", *adamw, "train.steps=1", f"run.init_from={tmp_path / 'runs/flat'}")
    ((refused, started),) = run_cases(1, [(tiny_config, goes_on), (tiny_config, starts_anew)])
    assert "step_00000006 holds the state of optim.name=muon" in refused
    assert "run.init_from=" in refused and "\n" not in refused
    assert started == 0


def final_tensors(run_folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer tensors of the newest checkpoint, flat, by kind/NAME."""
    tensors = {}
    with CheckpointReader(find_checkpoint(run_folder)) as reader:
        for name, shape in reader.state.parameters.items():
            for kind in ("master", *reader.optimizer_tensors(name)):
                tensors[f"{kind}/{name}"] = torch.empty(torch.Size(shape).numel())
                reader.read_range(kind, name, tensors[f"{kind}/{name}"], 0)
    return tensors
