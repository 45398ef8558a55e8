"""Loss of a text: every token once, equal to plain loops and to the exported model's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.load_tokenizer import load_tokenizer
from data.sentencepiece_tokenizer import train_sentencepiece
from data.tokenizer import Tokenizer
from launch.evaluate import main
from launch.hf.export import export
from launch.inference.evaluation import encode_text, evaluate_tokens, plan_windows, summarise
from launch.inference.load_model import load_model
from model.gpt import GPT
from tests.conftest import ROOT, environment
from tests.launch.helpers.requirements import require_optional_package
from tests.launch.helpers.small_models import make_model, save_model

TEXT = "Kan sel mir lot.\r\n\tLot kan, é 👩🏽‍🚀 sel  sel mir! " * 30


@st.composite
def window_sizes(draw: st.DrawFn) -> tuple[int, int]:
    window = draw(st.integers(1, 20))
    return window, draw(st.integers(1, window))


@given(st.integers(2, 100), window_sizes())
def test_every_token_counts_once_with_all_the_context_there_is(num_tokens: int, sizes: tuple[int, int]) -> None:
    window, stride = sizes
    counted = []
    for start, length, skipped in plan_windows(num_tokens, window, stride):
        assert 1 <= length <= window
        assert 0 <= skipped < length
        for position in range(skipped, length):
            counted.append(start + position + 1)
            # As much context as the stride promises, or all that there is.
            assert position + 1 > window - stride or start == 0
    assert counted == list(range(1, num_tokens))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer."""
    folder = tmp_path_factory.mktemp("evaluate")
    words = [f"{a}{b}{c} " for a in "kslm" for b in "aeiou" for c in "ntr"]
    train_sentencepiece(["".join(words) * 20], folder / "tokenizer.model", 300, "bpe")
    return save_model(make_model(vocab_size=320), folder / "checkpoint", tokenizer=folder / "tokenizer.model")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> GPT:
    return load_model(checkpoint, torch.device("cpu"), torch.float32)[0]


@pytest.mark.parametrize(("window", "stride", "batch_size"), [(16, 16, 4), (16, 5, 3), (160, 160, 1), (7, 1, 50)])
def test_equals_a_plain_loop(model: GPT, window: int, stride: int, batch_size: int) -> None:
    """One token at a time, from the window that begins last among those which reach it first."""
    tokens = np.random.default_rng(0).integers(320, size=95, dtype=np.int32)
    expected = 0.0
    for target in range(1, len(tokens)):
        start = 0 if target <= window else -(-(target - window) // stride) * stride
        with torch.no_grad():
            logits = model.logits(torch.from_numpy(tokens[None, start:target]))[0, -1]
        expected -= float(logits.log_softmax(-1)[tokens[target]])
    total, count = evaluate_tokens(model, tokens, window, stride, batch_size)
    assert count == len(tokens) - 1
    assert total == pytest.approx(expected, rel=1e-5)


def run(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_equals_the_exported_models_loss(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    code, output, _ = run([checkpoint, "--text", tmp_path / "text.txt", "--window", "50", "--json"], capsys)
    assert code == 0
    result = json.loads(output)
    export(checkpoint, tmp_path / "out", "fp32")
    capsys.readouterr()
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT, return_tensors="pt")["input_ids"]
    total = 0.0
    for start in range(0, ids.shape[1] - 1, 50):
        part = ids[:, start : start + 51]
        with torch.no_grad():
            total += float(twin(part, labels=part).loss) * (part.shape[1] - 1)
    assert result["num_tokens"] == ids.shape[1] - 1
    assert result["loss"] == pytest.approx(total / (ids.shape[1] - 1), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    first = load_tokenizer(checkpoint / "tokenizer.model").decode(ids[0, :1].tolist())
    assert result["num_bytes"] == len(TEXT.encode()) - len(first.encode())
    assert result["bits_per_byte"] == pytest.approx(total / result["num_bytes"] / math.log(2), rel=1e-5)
    assert result["byte_perplexity"] == pytest.approx(math.exp(total / result["num_bytes"]), rel=1e-5)


def test_a_long_text_is_encoded_in_parts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, text = load_tokenizer(checkpoint / "tokenizer.model"), TEXT * 100
    whole = tokenizer.encode(text)
    lengths = []

    def encode_array(part: str) -> np.ndarray:
        lengths.append(len(part))
        return type(tokenizer).encode_array(tokenizer, part)

    monkeypatch.setattr(tokenizer, "encode_array", encode_array)
    assert encode_text(tokenizer, text, None).tolist() == whole
    assert max(lengths) < len(text) / 2
    lengths.clear()
    assert encode_text(tokenizer, text, 1000).tolist() == whole[:1000]
    assert sum(lengths) < len(text) / 2


def test_what_is_printed(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    code, output, errors = run([checkpoint, "--text", tmp_path / "text.txt", "--max-tokens", "200"], capsys)
    assert code == 0
    assert errors == ""
    assert output.startswith("199 tokens, ")
    assert "windows of 160, stride 160" in output
    assert "per token: loss " in output
    assert "per byte: " in output


def test_numbers_that_no_exponential_can_hold() -> None:
    assert summarise(1e9, 10, 10).perplexity == math.inf


def test_bad_input_is_one_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "one character").write_text("é")
    plain = save_model(make_model(), tmp_path / "plain")
    cases: list[tuple[list[Any], str]] = [
        ([tmp_path / "nowhere", "--text", text], "no such checkpoint"),
        ([checkpoint, "--text", tmp_path / "nowhere"], "nowhere: no such file"),
        ([checkpoint, "--text", tmp_path / "binary"], "binary: not UTF-8 text"),
        ([checkpoint, "--text", tmp_path / "empty"], "too short: it has 0 tokens"),
        ([checkpoint, "--text", tmp_path / "one character"], "one character: too short"),
        ([checkpoint, "--text", tmp_path], "Is a directory"),
        ([checkpoint, "--text", text, "--window", "161"], "--window is 161; expected 1 to 160"),
        ([checkpoint, "--text", text, "--window", "16", "--stride", "17"], "--stride is 17; expected 1 to 16"),
        ([checkpoint, "--text", text, "--batch-size", "0"], "--batch-size is 0; expected at least 1"),
        ([checkpoint, "--text", text, "--max-tokens", "1"], "--max-tokens is 1; expected at least 2"),
        ([plain, "--text", text], "has no tokenizer"),
        (
            [plain, "--text", text, "--tokenizer", checkpoint / "tokenizer.model"],
            "ids, more than the model's vocabulary",
        ),
    ]
    for arguments, message in cases:
        code, _, errors = run(arguments, capsys)
        assert code == 1, arguments
        assert message in errors
        assert errors.count("\n") == 1


TASK = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval_takes_the_exported_folder(checkpoint: Path, model: GPT, tmp_path: Path) -> None:
    """A local task whose right answers are what the model itself finds most likely: accuracy 1."""
    require_optional_package("lm_eval")
    tokenizer = load_tokenizer(checkpoint / "tokenizer.model")
    questions = []
    for question in ("kan sel", "mir lot kan", "sat ler", "lin mon"):
        choices = [" kan", " sel mir", " lot"]
        scores = [log_likelihood(model, tokenizer, question, choice) for choice in choices]
        questions.append({"question": question, "choices": choices, "answer": scores.index(max(scores))})
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=tmp_path / "tiny.jsonl"))
    export(checkpoint, tmp_path / "out", "fp32")
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "tiny_choice", "--device", "cpu"),
        *("--model_args", f"pretrained={tmp_path / 'out'},dtype=float32", "--include_path", str(tmp_path)),
        *("--output_path", str(tmp_path / "results"), "--batch_size", "2"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    finished = subprocess.run(
        command, cwd=ROOT, env={**environment(), **offline}, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (results,) = tmp_path.glob("results/**/results_*.json")
    assert json.loads(results.read_text())["results"]["tiny_choice"]["acc,none"] == 1.0


def log_likelihood(model: GPT, tokenizer: Tokenizer, question: str, choice: str) -> float:
    context, whole = tokenizer.encode(question), tokenizer.encode(question + choice)
    with torch.no_grad():
        log_probabilities = model.logits(torch.tensor([whole[:-1]]))[0].log_softmax(-1)
    return sum(float(log_probabilities[i - 1, whole[i]]) for i in range(len(context), len(whole)))
