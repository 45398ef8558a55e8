"""Every shipped configuration is valid, and its dry run needs neither data nor DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.load import load_config
from launch.errors import EXIT_USAGE
from launch.planning.fit import USABLE_FRACTION
from launch.planning.memory import model_sizes, plan_memory
from launch.planning.plan import ASSUMED_VOCAB_SIZE, print_plan
from tests.conftest import ROOT, python
from train import main, parse_arguments

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


@pytest.mark.parametrize(
    ("name", "num_gpus"), [("gpt-124m", 1), ("gpt-1b", 8), ("gpt-7b", 64), ("mla-1b", 8), ("mla-7b", 64)]
)
def test_a_configuration_fits_the_gpus_that_it_names(name: str, num_gpus: int) -> None:
    """And has as many parameters as its first lines say, with the vocabulary that is assumed without data."""
    path = ROOT / f"configs/{name}.yaml"
    about = re.sub(r"\n# ", " ", path.read_text().split("\nmodel:")[0])
    assert about.startswith(f"# For {num_gpus} GPU{'s' if num_gpus > 1 else ''}")
    stated = re.search(r"([\d,]+) parameters with a vocabulary of ([\d,]+)", about)
    assert stated is not None
    assert int(stated[2].replace(",", "")) == ASSUMED_VOCAB_SIZE
    config = load_config(path, [f"model.vocab_size={ASSUMED_VOCAB_SIZE}"])
    sizes = model_sizes(config)
    assert sizes.num_parameters == int(stated[1].replace(",", ""))
    assert config.train.global_batch_tokens % (num_gpus * config.train.micro_batch_size * config.model.max_seq_len) == 0
    memory = 24e9 if "24 GB" in about else 80e9
    assert plan_memory(sizes, config, config.deepspeed.zero_stage, num_gpus).peak <= USABLE_FRACTION * memory


def test_memory_in_the_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each stage and number of GPUs with the plan's figures, and the fewest GPUs of a given memory."""
    path = str(ROOT / "configs/gpt-7b.yaml")
    assert main([path, "model.vocab_size=32000", "--dry-run", "--gpu-memory", "40GiB"]) == 0
    output = capsys.readouterr().out
    rows = {tuple(cells[:2]): cells[2:] for cells in map(str.split, output.splitlines()) if len(cells) == 11}
    assert rows[("ZeRO", "GPUs")][-2:] == ["peak", "at"]
    config = load_config(path, ["model.vocab_size=32000"])
    for stage in range(4):
        for num_gpus in (1, 8, 64):
            plan = plan_memory(model_sizes(config), config, stage, num_gpus)
            figures = [f"{num_bytes / 1e9:.2f}" for num_bytes in (*plan.parts.values(), plan.peak)]
            assert rows[(f"{stage}*" if stage == 2 else f"{stage}", f"{num_gpus}")] == [*figures, plan.peak_moment]
    assert "42.95 GB (--gpu-memory)" in output
    assert "ZeRO stage 0: does not fit on any number of GPUs" in output
    assert re.search(r"ZeRO stage 3: fits on \d+ or more", output)

    assert main([path, "--dry-run", "--gpu-memory", "lots"]) == 2
    assert "--gpu-memory: 'lots' is not a memory size; expected e.g. 80GB or 80GiB" in capsys.readouterr().err
    assert main([path, "model.vocab_size=32000", "--dry-run"]) == 0
    assert "80 GB (assumed; --gpu-memory sets it)" in capsys.readouterr().out


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

    assert model_sizes(config).num_muon == hidden
    assert model_sizes(load_config(ROOT / "configs/gpt-7b.yaml", settings[:2])).num_muon == 0


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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpus", "8"], "--gpus 8 is only for --plan; the launcher sets the number of GPUs of a run"),
        (["--dry-run", "--gpus", "8"], "--gpus 8 is only for --plan"),
        (["--gpu-memory", "80GB"], "--gpu-memory 80GB is only for --plan and --dry-run"),
        (["--plan", "--dry-run"], "argument --dry-run: not allowed with argument --plan"),
    ],
)
def test_options_of_a_plan_start_no_run(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["configs/debug.yaml", *arguments])
    assert ended.value.code == EXIT_USAGE
    assert problem in capsys.readouterr().err


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
