"""Text from a checkpoint: any ZeRO stage, one process, no DeepSpeed; and `prepare` -> train -> generate as one path."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data.load_tokenizer import load_tokenizer
from data.manifest import Manifest
from launch.checkpoint.files import CONFIG, find_checkpoint, read_config
from launch.generate import main
from launch.inference.load_model import load_model
from model.generate import generate
from tests.conftest import python
from tests.launch.helpers.small_models import make_model, save_model, trained_run


@pytest.fixture(scope="module")
def trained(session_folder: Path) -> Path:
    return trained_run(session_folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of the command in this process."""
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_command_continues_a_text_it_has_learnt(trained: Path) -> None:
    finished = python(
        *("-m", "launch.generate", trained, "--prompt", "We hold these"),
        *("--temperature", "0", "--max-new-tokens", "12"),
    )
    assert finished.code == 0, finished.errors
    assert finished.output.startswith("We hold these truths to be self-evident.")
    # 2 layers, keys and values, 2 heads of 16; 4 bytes each on CPU, 2 on GPU
    value_bytes = 2 if torch.cuda.is_available() else 4
    assert f"cache: {2 * 2 * 2 * 16 * value_bytes} bytes per token\n" in finished.errors


def test_a_seed_decides_the_sample(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [
        run(capsys, trained, "--prompt", "Peace", "--temperature", 2, "--seed", seed)[1] for seed in ("1", "1", "2")
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_cached_decoding_equals_the_full_forward(trained: Path) -> None:
    model, checkpoint = load_model(trained, torch.device("cpu"), torch.float32)
    tokens = load_tokenizer(checkpoint / "tokenizer.model").encode("Congress shall make")
    greedy = list(tokens)
    with torch.no_grad():
        for _ in range(20):
            greedy.append(int(model.logits(torch.tensor([greedy]))[0, -1].argmax()))
    assert [*tokens, *generate(model, tokens, 20, temperature=0)] == greedy


def test_a_text_ends_at_the_id_that_ended_the_training_documents(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = find_checkpoint(trained)
    tokenizer = load_tokenizer(checkpoint / "tokenizer.model")
    manifest = Manifest.read(trained.parents[1] / "shards/train")
    assert read_config(checkpoint).data.eod_id == manifest.eod_id
    # As if the documents had ended with a token that the text has in its middle, not with the tokenizer's own one.
    model, _ = load_model(trained, torch.device("cpu"), torch.float32)
    new_tokens = list(generate(model, tokenizer.encode("We hold these"), 8, temperature=0))
    other = save_model(model, tmp_path / "other", tokenizer=checkpoint / "tokenizer.model", eod_id=new_tokens[3])
    _, output, _ = run(capsys, other, "--prompt", "We hold these", "--temperature", "0", "--max-new-tokens", "8")
    assert output.rstrip("\n") == tokenizer.decode([*tokenizer.encode("We hold these"), *new_tokens[:3]])


def test_bad_input_is_one_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    shutil.copytree(find_checkpoint(trained), damaged)
    (damaged / "rank_00001.safetensors").unlink()
    unreadable = tmp_path / "unreadable"
    shutil.copytree(find_checkpoint(trained), unreadable)
    (unreadable / CONFIG).write_text("model: [")
    small = save_model(make_model(), tmp_path / "small")
    tokenizer = find_checkpoint(trained) / "tokenizer.model"
    cases: list[tuple[list[Any], str]] = [
        ([trained, "--temperature", "-1"], "temperature is -1.0; expected 0 or more"),
        ([trained, "--temperature", "nan"], "--temperature is nan; expected a finite number"),
        ([trained, "--top-p", "0"], "top_p is 0.0"),
        ([trained, "--top-p", "nan"], "top_p is nan"),
        ([trained, "--seed", "-1"], "--seed is -1; expected 0 to"),
        ([trained, "--seed", str(2**70)], "--seed is"),
        ([trained, "--max-new-tokens", "1000"], "more than model.max_seq_len 64"),
        ([trained, "--max-new-tokens", "0"], "--max-new-tokens is 0; expected at least 1"),
        ([trained, "--prompt", ""], "the prompt is empty"),
        ([trained, "--prompt", "Peace and commerce. " * 30], "leaves no room in model.max_seq_len=64"),
        ([trained, "--tokenizer", "/nowhere.model"], "/nowhere.model"),
        ([small], "has no tokenizer"),
        ([small, "--tokenizer", tokenizer], "has 390 ids, more than the model's vocabulary of 128"),
        ([tmp_path / "empty"], "no checkpoint found"),
        ([damaged], "rank_00001.safetensors: is missing"),
        ([unreadable], "config.yaml"),
    ]
    for (path, *options), message in cases:
        code, _, errors = run(capsys, path, "--prompt", "We", *options)
        assert code == 1, options
        assert message in errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
