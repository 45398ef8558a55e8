"""What is used of DeepSpeed's internals is there in the pinned version, and is named where it is not."""

from __future__ import annotations

import logging
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from torch import nn

from launch.engine import deepspeed_internals
from launch.engine.deepspeed_internals import WRITTEN_FOR, check_internals
from launch.errors import RunError


def engine(stage: int, **without: str) -> Any:
    """An engine with all that is used at a stage, less one attribute of the engine, the optimizer or a parameter."""
    module = nn.Linear(2, 2)
    mapping = dict.fromkeys(("lp_fragment_address", "hp_fragment_address", "param_group_index"))
    for parameter in module.parameters():
        attributes: dict[str, Any] = {}
        if stage == 3:
            attributes = dict.fromkeys(deepspeed_internals._PARAMETERS_AT_STAGE_3)
        elif stage > 0:
            kept = {name: value for name, value in mapping.items() if name != without.get("mapping")}
            attributes = {"_hp_mapping": SimpleNamespace(**kept)}
        attributes.pop(without.get("parameter", ""), None)
        vars(parameter).update(attributes)
    names = deepspeed_internals._STAGE_3 if stage == 3 else deepspeed_internals._STAGES_1_AND_2
    optimizer = dict.fromkeys((*names, "single_partition_of_fp32_groups"))
    optimizer.pop(without.get("optimizer", ""), None)
    own = dict.fromkeys(deepspeed_internals._ENGINE)
    own.pop(without.get("engine", ""), None)
    return SimpleNamespace(
        **own, optimizer=SimpleNamespace(**optimizer), module=module, zero_optimization_stage=lambda: stage
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_complete_engine_passes(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    check_internals(engine(stage))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("stage", "without", "name"),
    [
        (0, {"engine": "was_step_applied"}, "engine.was_step_applied"),
        (1, {"optimizer": "update_lp_params"}, "SimpleNamespace.update_lp_params"),
        (2, {"optimizer": "single_partition_of_fp32_groups"}, "SimpleNamespace.single_partition_of_fp32_groups or ."),
        (2, {"parameter": "_hp_mapping"}, "_hp_mapping of a parameter"),
        (1, {"mapping": "hp_fragment_address"}, "_hp_mapping.hp_fragment_address"),
        (3, {"optimizer": "grad_position"}, "SimpleNamespace.grad_position"),
        (3, {"parameter": "ds_shape"}, "a parameter.ds_shape"),
    ],
)
def test_what_is_missing_is_named_with_the_version(stage: int, without: dict[str, str], name: str) -> None:
    with pytest.raises(RunError) as raised:
        check_internals(engine(stage, **without))
    assert f"DeepSpeed {deepspeed.__version__} lacks {name}" in str(raised.value)
    assert f"written for {WRITTEN_FOR}" in str(raised.value)


def test_everything_missing_is_named_at_once() -> None:
    incomplete = engine(1, engine="backward", optimizer="update_lp_params")
    with pytest.raises(RunError, match=r"lacks engine\.backward, SimpleNamespace\.update_lp_params; "):
        check_internals(incomplete)


def test_another_version_with_the_same_internals_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "9.9.9")
    check_internals(engine(3))
    ((_, level, message),) = caplog.record_tuples
    assert level == logging.WARNING
    assert "9.9.9" in message and WRITTEN_FOR in message


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_real_engines_lack_nothing(num_ranks: int, tiny_config: Path, run_cases: Any) -> None:
    """At every stage and precision: a run checks its engine as soon as it is made, and uses all of it in a step."""
    combinations = [*product((0, 1, 2, 3), ("fp32",)), *product((1, 2, 3, 0), ("bf16",))]
    cases = [
        (
            tiny_config,
            [
                f"run.name=s{stage}_{precision}",
                f"deepspeed.zero_stage={stage}",
                f"train.precision={precision}",
                "train.steps=1",
            ],
        )
        for stage, precision in combinations
    ]
    for outcomes in run_cases(num_ranks, cases):
        assert dict(zip(combinations, outcomes, strict=True)) == dict.fromkeys(combinations, 0)
