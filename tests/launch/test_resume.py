"""A run that stops and goes on in a new process has bit-identical losses, at every ZeRO stage and precision."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import read_metrics

STAGES_AND_PRECISIONS = list(itertools.product((0, 1, 2, 3), ("fp32", "bf16")))


def overrides(name: str, stage: int, precision: str, *more: str) -> list[str]:
    result = [f"run.name={name}", f"deepspeed.zero_stage={stage}", f"train.precision={precision}", *more]
    if stage == 3:  # the default keeps all parameters of so small a model whole
        result.append("deepspeed.overrides.zero_optimization.stage3_param_persistence_threshold=64")
    return result


def losses(run_folder: Path) -> list[tuple[Any, ...]]:
    return [(record["step"], record["loss"], record.get("val_loss")) for record in read_metrics(run_folder)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resumed_losses_are_bit_identical(num_ranks: int, tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    whole, first, second = [], [], []
    for stage, precision in STAGES_AND_PRECISIONS:
        name = f"{stage}_{precision}"
        whole.append((tiny_config, overrides(f"whole_{name}", stage, precision)))
        first.append((tiny_config, overrides(f"parts_{name}", stage, precision, "train.stop_step=3")))
        second.append((tiny_config, overrides(f"parts_{name}", stage, precision)))
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
