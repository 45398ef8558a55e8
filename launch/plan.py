"""`--dry-run`: what a configuration means, in figures, without data, DeepSpeed or training."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence

import torch
import yaml

from configs.schema import Config, ModelConfig
from launch.deepspeed_config import deepspeed_config
from launch.muon import MUON
from launch.optimizer import group_algorithm, group_rates, optimizer_groups
from launch.run_folder import RunFolder
from launch.topology import detect_topology
from model.attention.mla import latent_sizes
from model.cross_entropy import MAX_CHUNK_BYTES
from model.flops import flops_per_token
from model.gpt import GPT
from model.initialisation import InitRow, describe_init
from model.parameters import Kind, collect_specs

ASSUMED_VOCAB_SIZE = 32_768
GIGABYTE = 1e9


def print_plan(config: Config) -> None:
    """Prints the resolved configuration, sizes, groups, batch, memory and the DeepSpeed configuration."""
    config, vocabulary_note = with_vocabulary(config)
    with torch.device("meta"):
        model = GPT(config.model)
    world_size = detect_topology(os.environ).world_size
    sections = (
        ("Configuration", [yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip()]),
        ("Run", [f"folder: {RunFolder.of(config).path}", *vocabulary_note]),
        ("Parameters", _parameter_lines(model, config)),
        ("Initial values", _init_lines(model)),
        ("Optimizer groups", _group_lines(model, config)),
        ("Batch", _batch_lines(config, world_size)),
        ("Memory of one rank (estimate)", _memory_lines(model, config)),
        ("DeepSpeed configuration", [json.dumps(_deepspeed(config, model, world_size), indent=1)]),
    )
    for title, lines in sections:
        print(f"== {title}")
        print("\n".join(lines), end="\n\n")


def with_vocabulary(config: Config) -> tuple[Config, list[str]]:
    """The configuration with a vocabulary size, and a line that says when it had to be assumed."""
    if config.model.vocab_size is not None:
        return config, []
    from configs.errors import ConfigError
    from launch.training_data import open_data

    try:
        return open_data(config)[1], []
    except ConfigError as error:
        model = config.model.model_copy(update={"vocab_size": ASSUMED_VOCAB_SIZE})
        notes = [f"vocabulary: {ASSUMED_VOCAB_SIZE:,} assumed, since the data cannot be read yet:", *error.problems]
        return config.model_copy(update={"model": model}), notes


def accumulation_steps(config: Config, world_size: int) -> int:
    """Micro-batches that a rank runs in one optimizer step."""
    assert config.data.seq_len is not None
    samples = config.train.global_batch_tokens // config.data.seq_len
    return math.ceil(samples / (config.train.micro_batch_size * world_size))


def memory_bytes(
    num_parameters: int, config: Config, stage: int, num_ranks: int, num_muon: int = 0
) -> dict[str, float]:
    """Bytes of one rank by what they hold, from the layout that DeepSpeed uses at each stage and precision.

    fp32: 4-byte weights and gradients, 8 for AdamW's moments, and from stage 1 on 4 for separate masters.
    bf16: 2-byte weights; fp32 masters and moments (12); gradients accumulated in fp32 (4), at stage 1 for the whole
    model. Stage 0 in bf16 keeps fp32 weights and casts them on use. Muon has one moment instead of two; what it needs
    for the time of a step (see `launch.muon`) is not counted, since the activations are gone by then.

    Args:
        num_muon: how many of the parameters have Muon.
    """
    weight_share = num_ranks if stage == 3 else 1
    optimizer_share = num_ranks if stage >= 1 else 1
    gradient_share = num_ranks if stage >= 2 else 1
    bf16 = config.train.precision == "bf16"
    if bf16 and stage > 0:
        weights, gradients, optimizer = 2.0, 4.0, 12.0
    else:
        weights, gradients, optimizer = 6.0 if bf16 else 4.0, 4.0, 8.0 if stage == 0 else 12.0
    return {
        "weights": weights * num_parameters / weight_share,
        "gradients": gradients * num_parameters / gradient_share,
        "optimizer": (optimizer * num_parameters - 4 * num_muon) / optimizer_share,
        "activations": _activation_bytes(config),
        "logits": _logit_bytes(config),
    }


def checkpoint_bytes(num_parameters: int, num_muon: int = 0) -> int:
    """Bytes of a checkpoint: fp32 masters and AdamW's two moments, or Muon's one."""
    return 12 * num_parameters - 4 * num_muon


def _logit_bytes(config: Config) -> float:
    """The fp32 logits of one chunk and their gradient."""
    assert config.data.seq_len is not None
    assert config.model.vocab_size is not None
    whole = 4 * config.train.micro_batch_size * config.data.seq_len * config.model.vocab_size
    return 2.0 * min(whole, MAX_CHUNK_BYTES)


def _activation_bytes(config: Config) -> float:
    """What the backward pass needs of one micro-batch: the inputs of every product, norm and nonlinearity."""
    model = config.model
    assert config.data.seq_len is not None
    assert model.ffn_dim is not None
    per_block = 4 * model.dim + _attention_activations(model) + 4 * model.ffn_dim
    if config.train.activation_checkpointing:
        kept = model.num_layers * model.dim + per_block
    else:
        kept = model.num_layers * per_block
    bytes_each = 2 if config.train.precision == "bf16" else 4
    return float(config.train.micro_batch_size * config.data.seq_len * kept * bytes_each)


def _attention_activations(model: ModelConfig) -> int:
    """Values of one token that the backward pass of one attention layer needs, without the layer's input."""
    if model.attention.kind == "mla":
        sizes = latent_sizes(model)
        latents = 2 * (sizes.kv_latent_dim + (sizes.q_latent_dim or 0))
        # Queries, keys, values and outputs have one width in the kernel.
        kernel = 4 * model.num_heads * max(sizes.query_key_dim, sizes.value_dim)
        norm_inputs = 2 * model.num_heads * sizes.query_key_dim if model.attention.qk_norm else 0
        return latents + kernel + norm_inputs + model.num_heads * sizes.value_dim
    assert model.head_dim is not None
    assert model.num_kv_heads is not None
    return 3 * (model.num_heads + model.num_kv_heads) * model.head_dim


def _parameter_lines(model: GPT, config: Config) -> list[str]:
    specs = collect_specs(model)
    totals: dict[Kind, int] = {}
    for name, parameter in model.named_parameters():
        kind = specs[name].kind
        totals[kind] = totals.get(kind, 0) + parameter.numel()
    assert config.data.seq_len is not None
    flops = flops_per_token(config.model, config.data.seq_len)
    steps = config.train.stop_step or config.train.steps
    tokens = steps * config.train.global_batch_tokens
    rows = [(kind.value, f"{count:,}", f"{count / model.num_parameters:.1%}") for kind, count in totals.items()]
    return [
        *_table(("kind", "parameters", "share"), rows),
        f"all: {model.num_parameters:,} parameters",
        f"training: {flops:.3e} FLOPs a token, {tokens:,} tokens, {flops * tokens:.3e} FLOPs in all",
    ]


def _init_lines(model: GPT) -> list[str]:
    rows = [
        (row.pattern, "x".join(map(str, row.shape)), row.count, _initial_values(row)) for row in describe_init(model)
    ]
    return _table(("parameter", "shape", "count", "initial values"), rows)


def _initial_values(row: InitRow) -> str:
    return f"{row.value:g}" if row.std is None else f"normal, std {row.std:.5f}"


def _group_lines(model: GPT, config: Config) -> list[str]:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    groups = optimizer_groups(collect_specs(model), config)
    peak_step = min(config.optim.warmup_steps, config.train.steps - 1)
    rates = group_rates(peak_step, config, groups)
    rows = [
        (
            group.value,
            group_algorithm(group, config),
            len(names),
            f"{sum(sizes[name] for name in names):,}",
            f"{rates[group.value]:.3g}",
            config.optim.weight_decay if group.is_decayed else 0.0,
        )
        for group, names in groups.items()
    ]
    return _table(("group", "optimizer", "tensors", "parameters", "peak learning rate", "weight decay"), rows)


def _batch_lines(config: Config, world_size: int) -> list[str]:
    assert config.data.seq_len is not None
    samples = config.train.global_batch_tokens // config.data.seq_len
    rows = []
    for ranks in dict.fromkeys((world_size, 1, 2, 8, 64)):
        accumulation = accumulation_steps(config, ranks)
        empty = accumulation * ranks * config.train.micro_batch_size - samples
        rows.append((ranks, config.train.micro_batch_size, accumulation, samples, empty))
    return [
        f"{config.train.global_batch_tokens:,} tokens a step = {samples} sequences of {config.data.seq_len} tokens",
        *_table(("ranks", "micro-batch", "accumulation", "sequences", "empty slots"), rows),
    ]


def count_muon(model: GPT, config: Config) -> int:
    """How many of the model's parameters have Muon."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    groups = optimizer_groups(collect_specs(model), config)
    return sum(
        sizes[name] for group, names in groups.items() if group_algorithm(group, config) == MUON for name in names
    )


def _memory_lines(model: GPT, config: Config) -> list[str]:
    num_muon = count_muon(model, config)
    rows = []
    for stage in (0, 1, 2, 3):
        for ranks in (1, 8, 64):
            parts = memory_bytes(model.num_parameters, config, stage, ranks, num_muon)
            figures = [f"{value / GIGABYTE:.3f}" for value in (*parts.values(), sum(parts.values()))]
            chosen = "*" if stage == config.deepspeed.zero_stage else ""
            rows.append((f"{stage}{chosen}", ranks, *figures))
    names = ("weights", "gradients", "optimizer", "activations", "logits", "sum")
    return ["gigabytes; * is the configured stage", *_table(("ZeRO", "ranks", *names), rows)]


def _deepspeed(config: Config, model: GPT, world_size: int) -> dict[str, object]:
    return deepspeed_config(config, world_size, accumulation_steps(config, world_size), model.num_parameters)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table with aligned columns: the first to the left, figures to the right."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
