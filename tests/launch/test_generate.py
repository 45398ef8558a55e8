"""Text from a checkpoint: any ZeRO stage, one process, no DeepSpeed; and `prepare` -> train -> generate as one path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from data.tokenizer import Tokenizer
from launch.checkpoint_files import find_checkpoint
from launch.load_model import load_model
from tests.conftest import finish, launcher_command, python, start

SENTENCES = (
    "The people of the United States are free.",
    "Congress shall make no law.",
    "Peace and commerce with all nations.",
    "We hold these truths to be self-evident.",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run at ZeRO stage 3 on two ranks, in bf16, on text prepared by the command."""
    folder = tmp_path_factory.mktemp("text")
    lines = [SENTENCES[index % 4] + (f" No. {index}." if index % 7 == 0 else "") for index in range(1200)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    prepared = python(
        *("-m", "data.prepare", "--input", folder / "text.txt", "--output", folder / "shards"),
        *("--train-tokenizer", "bpe", "--vocab-size", "384", "--document-per", "block", "--val-fraction", "0.1"),
    )
    assert prepared.code == 0, prepared.errors
    config = {
        "run": {"dir": str(folder / "runs"), "name": "text"},
        "model": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 64},
        "optim": {"lr": 1e-2, "warmup_steps": 5},
        "data": {
            "sources": [{"path": str(folder / "shards/train")}],
            "val_sources": {"text": str(folder / "shards/val")},
        },
        "train": {"steps": 80, "global_batch_tokens": 1024, "micro_batch_size": 8, "precision": "bf16"},
        "deepspeed": {
            "zero_stage": 3,
            "overrides": {"zero_optimization": {"stage3_param_persistence_threshold": 64}},
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    finished = finish(start(launcher_command("deepspeed", 2, "train.py", str(folder / "config.yaml"))))
    assert finished.code == 0, finished.output + finished.errors
    return folder / "runs/text"


def test_the_command_continues_a_text_it_has_learnt(trained: Path) -> None:
    finished = python(
        *("-m", "launch.generate", trained, "--prompt", "We hold these"),
        *("--temperature", "0", "--max-new-tokens", "12"),
    )
    assert finished.code == 0, finished.errors
    assert finished.output.startswith("We hold these truths to be self-evident.")
    # 2 layers, keys and values, 2 heads of 16; 4 bytes each on CPU, 2 on GPU
    value_bytes = 2 if torch.cuda.is_available() else 4
    assert f"cache: {2 * 2 * 2 * 16 * value_bytes} bytes a token\n" in finished.errors


def test_a_seed_decides_the_sample(trained: Path) -> None:
    outputs = [
        python("-m", "launch.generate", trained, "--prompt", "Peace", "--temperature", "2", "--seed", seed).output
        for seed in ("1", "1", "2")
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_cached_decoding_equals_the_full_forward(trained: Path) -> None:
    model, checkpoint = load_model(trained, torch.device("cpu"), torch.float32)
    tokens = Tokenizer.load(checkpoint / "tokenizer.model").encode("Congress shall make")
    from model.generate import generate

    greedy = list(tokens)
    with torch.no_grad():
        for _ in range(20):
            greedy.append(int(model.logits(torch.tensor([greedy]))[0, -1].argmax()))
    assert [*tokens, *generate(model, tokens, 20, temperature=0)] == greedy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0; expected 0 or more"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--max-new-tokens", "1000"], "more than model.max_seq_len 64"),
        (["--prompt", ""], "the prompt is empty"),
        (["--tokenizer", "/nowhere.model"], "/nowhere.model"),
    ],
)
def test_bad_options_are_one_line(trained: Path, arguments: list[str], message: str) -> None:
    finished = python("-m", "launch.generate", trained, "--prompt", "We", *arguments)
    assert finished.code == 1
    assert message in finished.errors
    assert finished.errors.count("\n") == 1


def test_a_path_without_checkpoint(tmp_path: Path) -> None:
    finished = python("-m", "launch.generate", tmp_path, "--prompt", "We")
    assert finished.code == 1
    assert "holds no checkpoint" in finished.errors


def test_a_damaged_checkpoint(trained: Path, tmp_path: Path) -> None:
    import shutil

    checkpoint = find_checkpoint(trained)
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "rank_00001.safetensors").unlink()
    finished = python("-m", "launch.generate", copy, "--prompt", "We")
    assert finished.code == 1
    assert "rank_00001.safetensors: is missing" in finished.errors
