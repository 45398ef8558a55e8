"""`--plan` proposes settings that fit, and the cheapest of them."""

from __future__ import annotations

import math

import pytest

from configs.load import load_config
from launch.fit import USABLE, propose, smallest_num_ranks
from launch.plan import memory_bytes
from tests.conftest import ROOT
from train import main

NUM_PARAMETERS = 7_500_000_000
CONFIG = load_config(ROOT / "configs/gpt-7b.yaml", ["model.vocab_size=32000"])


@pytest.mark.parametrize(("stage", "shared", "whole"), [(1, 12, 6), (2, 16, 2), (3, 18, 0)])
def test_the_fewest_ranks_by_hand(stage: int, shared: int, whole: int) -> None:
    """`shared` and `whole`: bytes of a parameter that the ranks share, and that each has; bf16, see ZeRO's figure 1."""
    parts = memory_bytes(NUM_PARAMETERS, CONFIG, stage, 1)
    rest = USABLE * 80e9 - parts["activations"] - parts["logits"]
    expected = math.ceil(shared * NUM_PARAMETERS / (rest - whole * NUM_PARAMETERS))
    assert smallest_num_ranks(NUM_PARAMETERS, CONFIG, stage, 80e9) == expected
    assert smallest_num_ranks(NUM_PARAMETERS, CONFIG, stage, (whole * NUM_PARAMETERS + 1e9) / USABLE) is None


def test_the_cheapest_settings_come_first() -> None:
    small = load_config(ROOT / "configs/gpt-124m.yaml", ["model.vocab_size=50304"])
    fits = [
        propose(124_000_000, small, 1, 80e9),
        propose(124_000_000, small, 8, 80e9),
        propose(NUM_PARAMETERS, CONFIG, 64, 80e9),
        propose(NUM_PARAMETERS, CONFIG, 64, 24e9),
        propose(NUM_PARAMETERS, CONFIG, 2, 80e9),
    ]
    choices = [None if fit is None else (fit.zero_stage, fit.activation_checkpointing) for fit in fits]
    assert choices == [(0, False), (1, False), (1, False), (2, True), (3, True)]
    assert propose(NUM_PARAMETERS, CONFIG, 1, 80e9) is None
    for fit, memory in zip(fits, (80e9, 80e9, 80e9, 24e9, 80e9), strict=True):
        assert fit is not None and fit.num_bytes <= USABLE * memory


def test_a_micro_batch_is_no_larger_than_a_ranks_share() -> None:
    tiny_batch = load_config(
        ROOT / "configs/gpt-124m.yaml", ["model.vocab_size=50304", "train.global_batch_tokens=4096"]
    )
    fit = propose(124_000_000, tiny_batch, 2, 80e9)
    assert fit is not None
    assert fit.micro_batch_size == 2  # 4 sequences of 1024 tokens on 2 ranks


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs/gpt-7b.yaml")
    options = ["--plan", "--gpu-memory", "80GB"]
    assert main([config, "model.vocab_size=32000", *options, "--gpus", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" parameters; 90% of 80GB are used")
    assert [line.split(":")[0] for line in lines[1:5]] == [f"ZeRO stage {stage}" for stage in range(4)]
    assert lines[5].startswith("proposal for 64: deepspeed.zero_stage=1 train.micro_batch_size=")
    for arguments, message in (
        (["--plan", "--gpus", "x", "--gpu-memory", "80"], "--gpus: 'x' is not a whole number from 1 on"),
        (["--plan", "--gpus", "1", "--gpu-memory", "80"], "--gpu-memory: '80' is not a memory; expected e.g. 80GB or"),
        ([*options, "--gpus", "1"], "--gpus: 1 of 80GB are too few for this model and sequence length"),
        (["--plan"], "--plan: expected --gpus N and --gpu-memory, e.g. 80GB"),
    ):
        assert main([config, "model.vocab_size=32000", *arguments]) == 2
        assert message in capsys.readouterr().err
