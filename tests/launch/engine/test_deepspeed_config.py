"""The DeepSpeed configuration is generated; overrides are merged in."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config
from launch.engine.deepspeed_config import deepspeed_config, merge


def generate(tiny_config: Path, *overrides: str) -> dict[str, object]:
    return deepspeed_config(load_config(tiny_config, overrides), world_size=4, accumulation=3, num_parameters=10**6)


def test_batch_and_clipping_follow_from_the_configuration(tiny_config: Path) -> None:
    config = generate(tiny_config, "optim.grad_clip=0")
    assert config["train_batch_size"] == 2 * 3 * 4
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0
    assert not {"optimizer", "scheduler"} & set(config)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_accumulates_and_reduces_in_fp32(tiny_config: Path, stage: int) -> None:
    config = generate(tiny_config, "train.precision=bf16", f"deepspeed.zero_stage={stage}")
    if stage == 0:
        assert "bf16" not in config
        assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    else:
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}
        assert config["communication_data_type"] == "fp32"


def test_overrides_reach_nested_keys(tiny_config: Path) -> None:
    config = generate(tiny_config, "deepspeed.overrides.zero_optimization.reduce_bucket_size=7")
    assert config["zero_optimization"]["reduce_bucket_size"] == 7  # type: ignore[index]
    assert config["zero_optimization"]["stage"] == 1  # type: ignore[index]


def test_merge_changes_neither_argument() -> None:
    base, overrides = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert merge(base, overrides) == {"a": {"b": 1, "c": 2}}
    assert (base, overrides) == ({"a": {"b": 1}}, {"a": {"c": 2}})
