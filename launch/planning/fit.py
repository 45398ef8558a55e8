"""Finds the ZeRO stage, micro-batch, activation checkpointing and number of GPUs that fit, from a memory plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from configs.errors import ConfigError
from configs.schema import Config
from launch.cli import byte_size
from launch.planning.memory import ModelSizes, plan_memory

GIGABYTE = 1e9
DEFAULT_GPU_BYTES = 80 * GIGABYTE
STAGES = (0, 1, 2, 3)
USABLE_FRACTION = 0.9  # of a GPU's memory; the rest is for fragmentation and what the plan omits
_MAX_RANKS = 1 << 16
_MAX_MICRO_BATCH_SIZE = 64  # larger micro-batches are not faster


@dataclass(frozen=True)
class GpuMemory:
    """The memory of one GPU, and where the value comes from."""

    num_bytes: float
    origin: str

    def __str__(self) -> str:
        return f"{self.num_bytes / GIGABYTE:.4g} GB ({self.origin})"


@dataclass(frozen=True)
class Fit:
    """Settings that fit.

    Attributes:
        num_bytes: Peak memory of one rank.
    """

    zero_stage: int
    micro_batch_size: int
    activation_checkpointing: bool
    num_bytes: float


def parse_gpu_memory(text: str) -> GpuMemory:
    """Parses the value of `--gpu-memory`, e.g. 80GB or 80GiB.

    Raises:
        ConfigError: It is not a size.
    """
    if not text.endswith(("GB", "GiB")):
        raise ConfigError([f"--gpu-memory: {text!r} is not a memory size; expected e.g. 80GB or 80GiB"])
    try:
        num_bytes = byte_size(text)
    except ValueError:
        raise ConfigError([f"--gpu-memory: {text!r} is not a memory size; expected e.g. 80GB or 80GiB"]) from None
    return GpuMemory(float(num_bytes), "--gpu-memory")


def find_gpu_memory(text: str | None) -> GpuMemory:
    """Returns the value of `--gpu-memory`, else the memory of the local GPU, else `DEFAULT_GPU_BYTES`.

    Raises:
        ConfigError: See `parse_gpu_memory`.
    """
    if text is not None:
        return parse_gpu_memory(text)
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return GpuMemory(float(device.total_memory), f"the local {device.name}")
    return GpuMemory(DEFAULT_GPU_BYTES, "assumed; --gpu-memory sets it")


def min_num_ranks(sizes: ModelSizes, config: Config, stage: int, gpu_bytes: float) -> int | None:
    """The fewest ranks on which the configured run fits at this stage; None if it fits on no number of ranks."""

    def fits(num_ranks: int) -> bool:
        return plan_memory(sizes, config, stage, num_ranks).peak <= USABLE_FRACTION * gpu_bytes

    if fits(1):
        return 1
    if not fits(_MAX_RANKS):
        return None
    low, high = 2, _MAX_RANKS  # from two ranks on, which need communication buffers, memory only falls with more ranks
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def min_gpus_lines(sizes: ModelSizes, config: Config, gpu_bytes: float) -> list[str]:
    """A line for each stage with the fewest GPUs on which the configured run fits."""
    lines = []
    for stage in STAGES:
        fewest = min_num_ranks(sizes, config, stage, gpu_bytes)
        result = "does not fit on any number of GPUs" if fewest is None else f"fits on {fewest} or more"
        lines.append(f"ZeRO stage {stage}: {result}")
    return lines


def propose(sizes: ModelSizes, config: Config, num_gpus: int, gpu_bytes: float) -> Fit | None:
    """Returns the cheapest settings that fit, with the largest micro-batch; None if none do.

    Checkpointing costs a third more FLOPs, so all stages are tried without it first. A higher stage costs
    communication. Stage 0 partitions nothing, so it is proposed for one GPU only.
    """
    assert config.data.seq_len is not None
    samples_per_rank = math.ceil(config.train.global_batch_tokens // config.data.seq_len / num_gpus)
    max_size = 1 << (min(samples_per_rank, _MAX_MICRO_BATCH_SIZE).bit_length() - 1)
    for checkpointing in (False, True):
        for stage in (1, 2, 3) if num_gpus > 1 else (0, 1):
            micro_batch_size = max_size
            while micro_batch_size >= 1:
                changed = with_settings(config, stage, micro_batch_size, checkpointing)
                num_bytes = plan_memory(sizes, changed, stage, num_gpus).peak
                if num_bytes <= USABLE_FRACTION * gpu_bytes:
                    return Fit(stage, micro_batch_size, checkpointing, num_bytes)
                micro_batch_size //= 2
    return None


def with_settings(config: Config, stage: int, micro_batch_size: int, checkpointing: bool) -> Config:
    """Returns the configuration with a proposal's settings."""
    train = {"micro_batch_size": micro_batch_size, "activation_checkpointing": checkpointing}
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "deepspeed": config.deepspeed.model_copy(update={"zero_stage": stage}),
        }
    )
