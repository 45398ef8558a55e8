"""Small checkpoints for the tests of export, import, evaluation and sampling: made without DeepSpeed, and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock
from safetensors.torch import save_file

from configs.load import to_yaml
from configs.schema import Config, ModelConfig, resolve, resolve_model
from launch.checkpoint.files import CONFIG, MANIFEST, STATE, TrainingState, file_entry, rank_file, write_state
from model.gpt import GPT
from model.initialisation import initialise
from tests.conftest import preloaded_ranks, python

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 160,
    "init_std": 0.15,
}
MLA_SIZES: dict[str, Any] = {"q_latent_dim": 12, "kv_latent_dim": 14, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}

SENTENCES = (
    "The people of the United States are free.",
    "Congress shall make no law.",
    "Peace and commerce with all nations.",
    "We hold these truths to be self-evident.",
)


def make_model(attention: dict[str, Any] | None = None, **sizes: Any) -> GPT:
    """A small model with large weights and gains that differ from 1, so that every part of it matters."""
    model = GPT(resolve_model(ModelConfig(**{**SMALL, **sizes}, attention=attention or {})))
    initialise(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model.eval()


def save_model(
    model: GPT,
    folder: Path,
    num_ranks: int = 1,
    tokenizer: Path | None = None,
    eod_id: int | None = None,
    **state: Any,
) -> Path:
    """A checkpoint whose parameters are cut into as many ranges as there are ranks."""
    folder.mkdir(parents=True)
    config = resolve(
        Config(
            run={"name": "small"},
            model=model.config,
            data={"sources": [{"path": "nowhere"}], "eod_id": eod_id},
            train={"steps": 1, "global_batch_tokens": model.config.max_seq_len},
        )
    )
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    values: dict[str, Any] = {
        "step": 0,
        "consumed_samples": 0,
        "num_ranks": num_ranks,
        "zero_stage": 3,
        "parameters": {name: list(parameter.shape) for name, parameter in parameters.items()},
        "groups": {},
        "optimizer_tensors": [],
        "optimizer_scalars": {},
        "policy_state": {},
        "data_fingerprints": [],
        "tokenizer_sha256": None,
        "tokenizer_file": None,
        "loss": 3.0,
    }
    names = [STATE, CONFIG]
    if tokenizer is not None:
        values["tokenizer_file"] = f"tokenizer{tokenizer.suffix}"
        (folder / values["tokenizer_file"]).write_bytes(tokenizer.read_bytes())
        names.append(values["tokenizer_file"])
    write_state(folder, TrainingState(**{**values, **state}))
    (folder / CONFIG).write_text(to_yaml(config))
    for rank in range(num_ranks):
        tensors, ranges = {}, {}
        for name, parameter in parameters.items():
            start, stop = (parameter.numel() * part // num_ranks for part in (rank, rank + 1))
            tensors[f"master/{name}"] = parameter.flatten()[start:stop].clone()
            ranges[name] = (start, stop)
        save_file(tensors, folder / rank_file(rank), metadata={"ranges": json.dumps(ranges)})
        names.append(rank_file(rank))
    (folder / MANIFEST).write_text(json.dumps({"files": {name: file_entry(folder / name) for name in names}}))
    return folder


def trained_run(session_folder: Path) -> Path:
    """The folder of a run at ZeRO stage 3 on two ranks, in bf16, on text prepared by the command.

    Args:
        session_folder: the folder that all processes of a test session share; the first one trains.
    """
    folder = session_folder / "trained_run"
    with FileLock(session_folder / "trained_run.lock"):
        if not (folder / "runs/text/DONE").is_file():
            folder.mkdir()
            _train(folder)
    return folder / "runs/text"


def _train(folder: Path) -> None:
    lines = [SENTENCES[index % 4] + (f" No. {index}." if index % 7 == 0 else "") for index in range(1200)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    prepared = python(
        *("-m", "data.prepare", "--input", folder / "text.txt", "--output", folder / "shards"),
        *("--train-tokenizer", "bpe", "--vocab-size", "390", "--document-per", "block", "--val-fraction", "0.1"),
    )
    assert prepared.code == 0, prepared.errors
    config = {
        "run": {"dir": str(folder / "runs"), "name": "text"},
        "model": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 64},
        "optim": {"lr": 1e-2, "warmup_steps": 5},
        "qk_control": {"policy": "constant"},
        "data": {
            "sources": [{"path": str(folder / "shards/train")}],
            "val_sources": {"held out": str(folder / "shards/val")},
        },
        "train": {"steps": 80, "global_batch_tokens": 1024, "micro_batch_size": 8, "precision": "bf16"},
        "deepspeed": {
            "zero_stage": 3,
            "overrides": {"zero_optimization": {"stage3_param_persistence_threshold": 64}},
        },
        "validation": {"every_steps": 20, "batches": 2},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    preloaded_ranks(2, "train.py", folder / "config.yaml")
