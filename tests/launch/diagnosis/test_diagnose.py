"""The offline analysis: attention captured from our checkpoints and from transformers, and the command itself."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from launch.diagnose import main
from launch.diagnosis.analysis import choose_lengths, cut_windows, fine_sizes
from launch.diagnosis.report import compare
from launch.diagnosis.sources import CheckpointSource, ModelShape, TransformersSource
from launch.errors import RunError
from model.diagnostics.critical import MIN_HEADS, critical_size, ks_p_value
from tests.conftest import python
from tests.launch.helpers.small_models import MLA_SIZES, make_model, save_model

TEXT = "All men by nature desire to know. " * 200
POSITIONS = torch.tensor([7, 31])
VOCABULARY = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def save_with_tokenizer(model: Any, folder: Path) -> Path:
    """A Hugging Face folder whose tokens are bytes."""
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=3, n_head=4, initializer_range=0.3,
        scale_attn_by_inverse_layer_idx=True,
    )  # fmt: skip
    return save_with_tokenizer(GPT2LMHeadModel(config), folder)


def llama(folder: Path) -> Path:
    torch.manual_seed(0)
    return save_with_tokenizer(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)), folder)


def gemma2(folder: Path, sliding_window: int = 64) -> Path:
    """With a softcap, a custom scale, and a sliding window in every other layer."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=16, attn_logit_softcapping=2.0, query_pre_attn_scalar=7,
        sliding_window=sliding_window,
    )  # fmt: skip
    return save_with_tokenizer(Gemma2ForCausalLM(config), folder)


def neox(folder: Path) -> Path:
    torch.manual_seed(0)
    return save_with_tokenizer(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)), folder)


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt2(tmp_path_factory.mktemp("hf") / "gpt2")


@pytest.mark.parametrize("build", [gpt2, llama, gemma2, neox])
def test_captured_weights_equal_those_of_eager_attention_in_transformers(
    build: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = build(tmp_path / "model")
    source = TransformersSource(folder, None)
    tokens = torch.tensor(source.encode(TEXT)[:32])
    eager = type(source._model).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = eager(tokens[None], output_attentions=True)
        layers = list(source.layers(tokens, POSITIONS))
        logits = source._model(tokens[None]).logits
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    for layer, attention in layers:
        found = attention.weights_BHQT.float()
        torch.testing.assert_close(found, expected.attentions[layer][:, :, POSITIONS], rtol=1e-4, atol=1e-6)


OPTIONS = {"sink": True, "softcap": 2.0, "ssmax": True, "gated": True}


@pytest.mark.parametrize(
    "keys",
    [
        {"attention": OPTIONS},
        {"num_kv_heads": 2, "attention": {"qk_norm": True}},
        {"attention": {"kind": "mla", "mla": MLA_SIZES, **OPTIONS}},
    ],
)
def test_captured_attention_of_our_checkpoint_equals_the_output_of_its_layers(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    """Σ α v from the captured weights is the layer's own output before its gate and W_o."""
    model = make_model(vocab_size=VOCABULARY, **keys)
    folder = save_model(model, tmp_path / "step_00000001")
    gpt2_tokenizer = gpt2(tmp_path / "gpt2") / "tokenizer.json"
    source = CheckpointSource(folder, gpt2_tokenizer)
    tokens = torch.arange(32) % 100
    outputs: list[torch.Tensor] = []
    gates: list[torch.Tensor] = []
    for block in model.blocks:
        block.attention.output.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
        if block.attention.gate is not None:
            block.attention.gate.register_forward_hook(lambda module, args, result: gates.append(result.sigmoid()))
    with torch.no_grad():
        model.logits(tokens[None])
    for layer, attention in source.layers(tokens, POSITIONS):
        before_gate = outputs[layer] / gates[layer] if gates else outputs[layer]
        expected = before_gate[0, POSITIONS].unflatten(-1, (4, -1)).transpose(0, 1)
        found = (attention.weights_BHQT @ attention.values_BHTV)[0].float()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_command_writes_tables_plots_and_a_report(gpt2_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["-m", "launch.diagnose", gpt2_folder, "--text", text, "--output", tmp_path / "out"]
    finished = python(*arguments, "--layers", "0,2", "--heads", "1-2", "--lengths", "2,64", "--random-sets", "3")
    assert finished.code == 0, finished.errors
    report = (tmp_path / "out/report.md").read_text()
    assert "arXiv 2508.17821" in report
    assert "| critical set size | not measured (the test needs at least 5 heads) | about 0.06 L |" in report
    page = (tmp_path / "out/report.html").read_text()
    assert "0.70 to 0.85" in report and "0.70 to 0.85" in page
    for figure in re.findall(r"\]\((.*?\.png)\)", report):
        assert (tmp_path / "out" / figure).stat().st_size > 5000
    with (tmp_path / "out/weights.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {(row["layer"], row["head"], row["L"]) for row in rows} == {
        (layer, head, length) for layer in "02" for head in "12" for length in ("2", "64")
    }
    with (tmp_path / "out/distance.csv").open() as stream:
        for row in csv.DictReader(stream):
            assert float(row["top"]) <= float(row["bound"]) and int(row["N"]) < int(row["L"])
    again = python(*arguments)
    assert again.code == 1 and "is not an empty folder" in again.errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--lengths", "65"], "--lengths: 65 is not between 2 and the model's context of 64"),
        (["--layers", "3"], "--layers: 3 does not exist; the model has 0 to 2"),
        (["--heads", "4"], "--heads: 4 does not exist"),
        (["--layers", ""], "--layers '': expected numbers and ranges"),
        (["--layers", "2-1"], "--layers '2-1': expected numbers and ranges"),
        (["--layers", "0-99999999999"], "expected numbers and ranges"),
        (["--text", "tests"], "--text tests: Is a directory"),
        (["--seed", "-1"], "--seed: -1 is not between 0"),
        (["--tokenizer", "absent"], "absent: no such file"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--max-queries", "0"], "--max-queries, --random-sets: expected at least 1"),
        (["--set-sizes", "0,4"], "--set-sizes: 0 is not between 1 and"),
        (["--lengths", "8", "--set-sizes", "8"], "--set-sizes: 8 is not between 1 and 7"),
    ],
)
def test_an_invalid_option_is_reported_in_one_line(
    change: list[str], message: str, gpt2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert run_here(gpt2_folder, text, tmp_path / "out", *change) in (1, 2)  # RunError, or argparse
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def run_here(model: Path, text: Path, output: Path, *options: str) -> int:
    """Runs the command in this process; argparse exits with SystemExit."""
    try:
        return main([str(model), "--text", str(text), "--output", str(output), *options])
    except SystemExit as end:
        return int(end.code or 0)


def test_a_short_text_and_a_folder_without_a_model_are_reported_in_one_line(
    gpt2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short")
    for model, message in (
        (gpt2_folder, "has 5 tokens; the largest length needs 64"),
        (tmp_path, "no checkpoint found"),
    ):
        assert run_here(model, text, tmp_path / "out") == 1
        assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_models_that_cannot_be_analysed_are_reported_in_one_line(
    gpt2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured with a mask, weights or a tokenizer that are not the model's own."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    bert = save_with_tokenizer(BertLMHeadModel(BertConfig(**SIZES)), tmp_path / "bert")
    neo_config = GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
    )
    neo = save_with_tokenizer(GPTNeoForCausalLM(neo_config), tmp_path / "neo")
    bloom_config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    bloom = save_with_tokenizer(BloomForCausalLM(bloom_config), tmp_path / "bloom")
    incomplete, reshaped, mute = (shutil.copytree(gpt2_folder, tmp_path / name) for name in ("less", "other", "mute"))
    weights = load_file(gpt2_folder / "model.safetensors")
    for folder, name in ((incomplete, "transformer.h.1.attn.c_attn.weight"), (reshaped, "transformer.h.0.ln_1.bias")):
        kept = {key: value for key, value in weights.items() if key != name}
        changed = {} if folder == incomplete else {name: torch.zeros(3)}
        save_file({**kept, **changed}, folder / "model.safetensors", metadata={"format": "pt"})
    for path in mute.glob("token*"):
        path.unlink()
    ours = save_model(make_model(), tmp_path / "step_00000001")
    large = tmp_path / "large.json"
    words = Tokenizer(models.WordLevel({"All": 300, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(large))
    for model, options, message in (
        (gemma2(tmp_path / "gemma2", sliding_window=8), [], "choose --lengths up to 8"),
        (bert, [], "only full causal attention is supported"),
        (neo, [], "gpt_neo models are not supported"),
        (bloom, [], "bloom models are not supported"),
        (incomplete, [], "has no weights for transformer.h.1.attn.c_attn.weight (1 in total)"),
        (reshaped, [], "has weights of the wrong shape for transformer.h.0.ln_1.bias (1 in total)"),
        (mute, [], "has no tokenizer"),
        (ours, [], "has no tokenizer"),
        (ours, ["--tokenizer", str(gpt2_folder)], "has 256 ids, more than the model's vocabulary of 128"),
        (gpt2_folder, ["--tokenizer", str(large)], "is outside the model's vocabulary of 256"),
    ):
        capsys.readouterr()
        assert run_here(model, text, tmp_path / "out", *options) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not (tmp_path / "out").exists()


def test_windows_do_not_overlap_and_lengths_fit() -> None:
    assert cut_windows(list(range(10)), 4, 5, Path("x")) == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert choose_lengths(None, ModelShape("m", 1, 1, 200, 1, 1)) == [32, 64, 128]
    assert choose_lengths(None, ModelShape("m", 1, 1, 20, 1, 1)) == [20]
    with pytest.raises(RunError, match="--lengths: 1 is not"):
        choose_lengths([1], ModelShape("m", 1, 1, 20, 1, 1))
    sizes = fine_sizes(1024)
    assert sizes[0] == 1 and sizes[-1] < 512 and len(sizes) <= 24 and sizes == sorted(set(sizes))


def test_the_critical_size_is_the_first_at_which_the_samples_do_not_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(200, generator=generator).tolist() for _ in range(2))
    assert ks_p_value(one, other) > 0.01 > ks_p_value(one, [value + 1 for value in other])
    assert critical_size({1: 1e-9, 5: 1e-4, 9: 0.02, 20: 1e-3}) == 9
    assert critical_size({1: 1e-9, 5: 1e-4}) is None
    for num_heads, is_enough in ((MIN_HEADS - 1, False), (MIN_HEADS, True)):
        apart = ks_p_value([0.0] * num_heads, [1.0] * num_heads)
        assert (apart < 0.01) == is_enough


def test_the_report_compares_measurements_with_the_paper() -> None:
    heads = [{"layer": 0, "head": head, "L": 100} for head in range(MIN_HEADS)]
    tables = {
        "weights": heads,
        "critical": [
            {**row, "N": n, "top": row["head"], "random": row["head"] + (9 if n < 25 else 0)}
            for row in heads
            for n in (5, 25)
        ],
        "separability": [{**row, "N": n, "share": n / 100} for row in heads for n in (5, 20, 40)],
        "sensitivity": [{**row, "temperature": 0.1, "sensitivity": row["head"]} for row in heads],
    }
    assert [finding.here for finding in compare(tables)] == ["0.250 L at L = 100", "0.30", "0.400"]
