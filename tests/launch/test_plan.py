"""Every shipped configuration is valid, and its dry run needs neither data nor DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.load import load_config
from launch.plan import count_muon, memory_bytes, print_plan
from model.gpt import GPT
from model.initialisation import initialise
from tests.conftest import ROOT, python

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MILLION = 1e6


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_is_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(load_config(path))
    output = capsys.readouterr().out
    for title in ("Configuration", "Parameters", "Initial values", "Optimizer groups", "Batch", "Memory", "DeepSpeed"):
        assert f"== {title}" in output
    assert "query_key" in output


@pytest.mark.parametrize(
    ("name", "vocab_size", "millions"),
    # GPT-2 small with SwiGLU of width 2048 and no positions to learn; Llama 2 7B with grouped queries is 5.9B in its
    # blocks (6.5B less 26.8M · 32 · 3/4 ... computed by hand below); the 1B model of arXiv 2511.21377.
    [
        ("gpt-124m", 50_304, (50_304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768) / MILLION),
        ("gpt-1b", 32_000, (32_000 * 2048 + 14 * (4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048) + 2048) / MILLION),
        (
            "gpt-7b",
            32_000,
            (2 * 32_000 * 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 11_008 + 2 * 4096) + 4096) / MILLION,
        ),
    ],
)
def test_parameter_counts_by_hand(
    name: str, vocab_size: int, millions: float, capsys: pytest.CaptureFixture[str]
) -> None:
    print_plan(load_config(ROOT / f"configs/{name}.yaml", [f"model.vocab_size={vocab_size}"]))
    assert f"all: {round(millions * MILLION):,} parameters" in capsys.readouterr().out


def test_memory_by_the_zero_paper() -> None:
    """ZeRO (arXiv 1910.02054), figure 1: 7.5B parameters, 64 ranks, 16-bit gradients: 31.4, 16.6 and 1.9 GB.

    Here gradients are accumulated in fp32, which adds 2 bytes a parameter at stages 2 and 3, shared by the ranks.
    """
    config = load_config(ROOT / "configs/gpt-7b.yaml", ["model.vocab_size=32000"])
    sums = {}
    for stage in (2, 3):
        parts = memory_bytes(7_500_000_000, config, stage, 64)
        sums[stage] = parts["weights"] + parts["gradients"] + parts["optimizer"]
    extra = 2 * 7.5e9 / 64
    assert sums[2] - extra == pytest.approx(16.6e9, rel=0.01)
    assert sums[3] - extra == pytest.approx(1.9e9, rel=0.02)


def test_muon_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Hidden matrices have Muon and one moment; the embedding, the head and the gains have AdamW and two."""
    settings = ["model.vocab_size=32000", "model.attention.qk_norm=true", "optim={name: muon, lr: 2e-3}"]
    config = load_config(ROOT / "configs/gpt-7b.yaml", [*settings, "optim.muon.adamw_lr=1e-3"])
    print_plan(config)
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: row[1:] for row in cells if row[1:2] in (["muon"], ["adamw"])}
    hidden = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 11_008)
    query_key = 32 * (4096**2 + 4096 * 1024)
    assert rows["query_key"][::2] == ["muon", f"{query_key:,}", "0.1"]
    assert rows["decay"] == ["muon", "160", f"{hidden - query_key:,}", "0.002", "0.1"]
    assert rows["head"] == ["adamw", "1", f"{32_000 * 4096:,}", "0.001", "0.1"]
    assert rows["no_decay"][0] == rows["query_key_no_decay"][0] == "adamw"
    assert rows["no_decay"][3] == "0.001"

    with torch.device("meta"):
        model = GPT(config.model)
    assert count_muon(model, config) == hidden
    assert count_muon(model, load_config(ROOT / "configs/gpt-7b.yaml", settings[:2])) == 0
    for stage, num_ranks, masters in ((0, 1, 0), (1, 8, 4), (2, 8, 4), (3, 64, 4)):
        expected = ((masters + 8) * (model.num_parameters - hidden) + (masters + 4) * hidden) / num_ranks
        in_fp32 = config.model_copy(update={"train": config.train.model_copy(update={"precision": "fp32"})})
        parts = memory_bytes(model.num_parameters, in_fp32, stage, num_ranks, hidden)
        assert parts["optimizer"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "attention",
    [
        "{}",
        "{qk_norm: true}",
        "{kind: mla}",
        "{kind: mla, qk_norm: true}",
        "{kind: mla, mla: {q_latent_dim: 96, value_dim: 80}}",
    ],
)
def test_activations_are_near_what_autograd_keeps(attention: str) -> None:
    """In fp32 on CPU, where each norm keeps a value more of its input than the estimate counts."""
    overrides = ["model.vocab_size=64", "model.num_kv_heads=4", f"model.attention={attention}"]
    kept_bytes = []
    for num_layers in (1, 3):
        config = load_config(ROOT / "configs/debug.yaml", [*overrides, f"model.num_layers={num_layers}"])
        model = GPT(config.model)
        initialise(model, seed=0)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor, weights: set[int] = weights, storages: dict = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
            return tensor

        tokens = torch.zeros(config.train.micro_batch_size, config.model.max_seq_len, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, tokens)
        kept_bytes.append(sum(storage.nbytes() for storage in storages.values()))
    estimate = memory_bytes(model.num_parameters, config, stage=1, num_ranks=1)["activations"]
    assert estimate == pytest.approx(3 / 2 * (kept_bytes[1] - kept_bytes[0]), rel=0.25)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_latent_attention_needs_one_key_only(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(load_config(path, ["model.attention.kind=mla"]))
    output = capsys.readouterr().out
    assert all(kind in output for kind in ("query_up", "query_rope", "kv_down", "key_up", "key_rope"))


def test_the_dry_run_imports_no_deepspeed_and_needs_no_data() -> None:
    script = (
        "import runpy, sys; sys.argv = ['train.py', 'configs/gpt-7b.yaml', '--dry-run']\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert not {'deepspeed', 'tensorboard', 'transformers', 'datasets'} & set(sys.modules)"
    )
    finished = python("-c", script)
    assert finished.code == 0, finished.errors
    assert "assumed" in finished.output


def test_help_imports_no_torch() -> None:
    script = (
        "import runpy, sys; sys.argv = ['train.py', '--help']\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    assert python("-c", script).code == 0
    for module in ("launch.generate", "data.prepare", "data.inspect"):
        source = (
            f"import runpy, sys; sys.argv = ['x', '--help']\ntry: runpy.run_module('{module}', run_name='__main__')\n"
        )
        finished = python(
            "-c", source + "except SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
        )
        assert finished.code == 0, finished.errors
        assert "usage" in finished.output
