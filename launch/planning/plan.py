"""`--dry-run` and `--plan`: print what a configuration means, without data, DeepSpeed or training."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch
import yaml
from tabulate import tabulate

from configs.errors import ConfigError
from configs.schema import Config
from launch.distributed.topology import detect_topology
from launch.engine.deepspeed_config import accumulation_steps, deepspeed_config
from launch.optim.optimizer import group_algorithm, group_learning_rates, optimizer_groups
from launch.planning.fit import (
    GIGABYTE,
    STAGES,
    USABLE_FRACTION,
    GpuMemory,
    find_gpu_memory,
    min_gpus_lines,
    parse_gpu_memory,
    propose,
    with_settings,
)
from launch.planning.memory import PARTS, model_sizes, plan_memory
from launch.run_folder.folder import RunFolder
from model.flops import flops_per_token
from model.gpt import GPT
from model.initialisation import InitRow, describe_init
from model.parameters import Kind, collect_specs

ASSUMED_VOCAB_SIZE = 32_768
PLANNED_RANKS = (1, 8, 64)


def print_plan(config: Config, gpu_memory: str | None = None) -> None:
    """Prints the resolved configuration, sizes, groups, batch, memory and the DeepSpeed configuration.

    Args:
        gpu_memory: The memory of one GPU, e.g. 80GB; None: that of the local GPU, or `DEFAULT_GPU_BYTES`.

    Raises:
        ConfigError: `gpu_memory` is not a size.
    """
    memory = find_gpu_memory(gpu_memory)
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
        ("Memory of one GPU (estimate)", _memory_lines(config, memory)),
        ("DeepSpeed configuration", [json.dumps(_deepspeed(config, model, world_size), indent=1)]),
    )
    for title, lines in sections:
        print(f"== {title}")
        print("\n".join(lines), end="\n\n")


def print_proposal(config: Config, num_gpus: str | None, gpu_memory: str | None) -> None:
    """Prints a proposal, and for each stage the fewest GPUs on which the configured run fits.

    Raises:
        ConfigError: An argument is not valid, or no settings fit.
    """
    if num_gpus is None or gpu_memory is None:
        raise ConfigError(["--plan: expected --gpus N and --gpu-memory, e.g. 80GB"])
    problems = []
    if not num_gpus.isdecimal() or int(num_gpus) == 0:
        problems.append(f"--gpus: {num_gpus!r} is not valid; expected an integer of at least 1")
    try:
        memory = parse_gpu_memory(gpu_memory)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    config, notes = with_vocabulary(config)
    sizes = model_sizes(config)
    print("\n".join([*notes, f"{sizes.num_parameters:,} parameters; {USABLE_FRACTION:.0%} of {gpu_memory} is used"]))
    print("\n".join(min_gpus_lines(sizes, config, memory.num_bytes)))
    fit = propose(sizes, config, int(num_gpus), memory.num_bytes)
    if fit is None:
        raise ConfigError([f"--gpus: {num_gpus} of {gpu_memory} are too few for this model and sequence length"])
    proposed = with_settings(config, fit.zero_stage, fit.micro_batch_size, fit.activation_checkpointing)
    print(
        f"proposal for {num_gpus}: deepspeed.zero_stage={fit.zero_stage} "
        f"train.micro_batch_size={fit.micro_batch_size} "
        f"train.activation_checkpointing={str(fit.activation_checkpointing).lower()}\n"
        f"about {fit.num_bytes / GIGABYTE:.1f} GB per rank, "
        f"{accumulation_steps(proposed, int(num_gpus))} micro-batches per step"
    )


def with_vocabulary(config: Config) -> tuple[Config, list[str]]:
    """Returns the configuration with a vocabulary size, and lines for the user if it had to be assumed."""
    if config.model.vocab_size is not None:
        return config, []
    from launch.training.data import open_data

    try:
        return open_data(config)[1], []
    except ConfigError as error:
        model = config.model.model_copy(update={"vocab_size": ASSUMED_VOCAB_SIZE})
        notes = [f"vocabulary: {ASSUMED_VOCAB_SIZE:,} assumed, because the data cannot be read yet:", *error.problems]
        return config.model_copy(update={"model": model}), notes


def _parameter_lines(model: GPT, config: Config) -> list[str]:
    specs = collect_specs(model)
    totals: dict[Kind, int] = {}
    for name, parameter in model.named_parameters():
        kind = specs[name].kind
        totals[kind] = totals.get(kind, 0) + parameter.numel()
    assert config.data.seq_len is not None
    flops = flops_per_token(config.model, config.data.seq_len)
    steps = config.train.last_step
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
    learning_rates = group_learning_rates(peak_step, config, groups)
    rows = [
        (
            group.value,
            group_algorithm(group, config),
            len(names),
            f"{sum(sizes[name] for name in names):,}",
            f"{learning_rates[group.value]:.3g}",
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


def _memory_lines(config: Config, gpu_memory: GpuMemory) -> list[str]:
    """Bytes of one GPU at each stage, and the fewest GPUs that the run fits onto."""
    sizes = model_sizes(config)
    rows = []
    for stage in STAGES:
        for ranks in PLANNED_RANKS:
            plan = plan_memory(sizes, config, stage, ranks)
            figures = [f"{value / GIGABYTE:.2f}" for value in (*plan.parts.values(), plan.peak)]
            chosen = "*" if stage == config.deepspeed.zero_stage else ""
            rows.append((f"{stage}{chosen}", ranks, *figures, plan.peak_moment))
    return [
        "in gigabytes, each part at its own maximum; the parts do not all occur at once, so the peak must fit;",
        "* marks the configured stage",
        *_table(("ZeRO", "GPUs", *PARTS, "peak", "at"), rows),
        f"fewest GPUs with {gpu_memory}, of which {USABLE_FRACTION:.0%} are used:",
        *min_gpus_lines(sizes, config, gpu_memory.num_bytes),
    ]


def _deepspeed(config: Config, model: GPT, world_size: int) -> dict[str, object]:
    return deepspeed_config(config, world_size, accumulation_steps(config, world_size), model.num_parameters)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a table: the first column is aligned to the left, the others to the right."""
    align = ("left", *["right"] * (len(header) - 1))
    return tabulate([header, *rows], tablefmt="plain", disable_numparse=True, colalign=align).splitlines()
