"""`--plan` proposes settings that fit, and the cheapest of them."""

from __future__ import annotations

import pytest

from configs.load import load_config
from launch.planning.fit import USABLE_FRACTION, min_gpus_lines, min_num_ranks, propose, with_settings
from launch.planning.memory import model_sizes, plan_memory
from tests.conftest import ROOT
from train import main

CONFIG = load_config(ROOT / "configs/gpt-7b.yaml", ["model.vocab_size=32000"])
SIZES = model_sizes(CONFIG)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_fewest_ranks_are_enough_and_one_less_is_not(stage: int) -> None:
    for gigabytes in (40, 60, 80):
        fewest = min_num_ranks(SIZES, CONFIG, stage, 1e9 * gigabytes)
        fits = [
            plan_memory(SIZES, CONFIG, stage, num_ranks).peak <= USABLE_FRACTION * 1e9 * gigabytes
            for num_ranks in range(1, 65)
        ]
        assert fewest == (fits.index(True) + 1 if any(fits) else None)
    on_one = plan_memory(SIZES, CONFIG, stage, 1).peak
    assert min_num_ranks(SIZES, CONFIG, stage, on_one / USABLE_FRACTION * 1.001) == 1


def test_where_no_number_of_gpus_is_enough() -> None:
    """Each GPU has 4 bytes a parameter of gradients at stage 1, and 2 of weights up to stage 2."""
    billions = SIZES.num_parameters / 1e9
    assert min_num_ranks(SIZES, CONFIG, 0, 80e9) is None
    assert min_num_ranks(SIZES, CONFIG, 1, 6 * billions * 1e9 / USABLE_FRACTION) is None
    assert min_num_ranks(SIZES, CONFIG, 2, 2 * billions * 1e9 / USABLE_FRACTION) is None
    assert "ZeRO stage 0: does not fit on any number of GPUs" in min_gpus_lines(SIZES, CONFIG, 80e9)


def test_the_cheapest_settings_come_first() -> None:
    small = load_config(ROOT / "configs/gpt-124m.yaml", ["model.vocab_size=50304"])
    small_sizes = model_sizes(small)
    cases = [
        (small, small_sizes, 1, 80e9, (0, False)),
        (small, small_sizes, 8, 80e9, (1, False)),
        (CONFIG, SIZES, 64, 80e9, (1, False)),
        (CONFIG, SIZES, 64, 24e9, (2, True)),
        (CONFIG, SIZES, 2, 80e9, (2, True)),
    ]
    for config, sizes, num_gpus, gpu_bytes, choice in cases:
        fit = propose(sizes, config, num_gpus, gpu_bytes)
        assert fit is not None
        assert (fit.zero_stage, fit.activation_checkpointing) == choice
        chosen = with_settings(config, fit.zero_stage, fit.micro_batch_size, fit.activation_checkpointing)
        assert plan_memory(sizes, chosen, fit.zero_stage, num_gpus).peak == fit.num_bytes <= USABLE_FRACTION * gpu_bytes
    assert propose(SIZES, CONFIG, 1, 80e9) is None


def test_a_micro_batch_is_no_larger_than_a_ranks_share() -> None:
    tiny_batch = load_config(
        ROOT / "configs/gpt-124m.yaml", ["model.vocab_size=50304", "train.global_batch_tokens=4096"]
    )
    fit = propose(model_sizes(tiny_batch), tiny_batch, 2, 80e9)
    assert fit is not None
    assert fit.micro_batch_size == 2  # 4 sequences of 1024 tokens on 2 ranks


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs/gpt-7b.yaml")
    options = ["--plan", "--gpu-memory", "80GB"]
    assert main([config, "model.vocab_size=32000", *options, "--gpus", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" parameters; 90% of 80GB is used")
    assert [line.split(":")[0] for line in lines[1:5]] == [f"ZeRO stage {stage}" for stage in range(4)]
    assert lines[5].startswith("proposal for 64: deepspeed.zero_stage=1 train.micro_batch_size=")
    for arguments, message in (
        (
            ["--plan", "--gpus", "x", "--gpu-memory", "80"],
            "--gpus: 'x' is not valid; expected an integer of at least 1",
        ),
        (
            ["--plan", "--gpus", "1", "--gpu-memory", "80"],
            "--gpu-memory: '80' is not a memory size; expected e.g. 80GB or",
        ),
        ([*options, "--gpus", "1"], "--gpus: 1 of 80GB are too few for this model and sequence length"),
        (["--plan"], "--plan: expected --gpus N and --gpu-memory, e.g. 80GB"),
    ):
        assert main([config, "model.vocab_size=32000", *arguments]) == 2
        assert message in capsys.readouterr().err
