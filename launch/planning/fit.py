"""Which ZeRO stage, micro-batch, checkpointing and number of GPUs fit: functions of a memory plan."""

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
USABLE = 0.9  # of a GPU's memory; the rest is for fragmentation and what the plan misses
_MOST_RANKS = 1 << 16
_MOST_ROWS = 64  # sequences of a micro-batch: more bring no speed
_SMALLEST_MEMORY = 10**6  # bytes; less is a number without its unit


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU, and in words where the figure is from."""

    num_bytes: float
    origin: str

    def __str__(self) -> str:
        return f"{self.num_bytes / GIGABYTE:.4g} GB ({self.origin})"


@dataclass(frozen=True)
class Fit:
    """Settings that fit.

    Attributes:
        num_bytes: of one rank at the peak.
    """

    zero_stage: int
    micro_batch_size: int
    activation_checkpointing: bool
    num_bytes: float


def parse_gpu_memory(text: str) -> GpuMemory:
    """The memory that `--gpu-memory` names, e.g. 80GB or 80GiB.

    Raises:
        ConfigError: it names none.
    """
    try:
        num_bytes = byte_size(text)
    except ValueError:
        num_bytes = 0
    if num_bytes < _SMALLEST_MEMORY:
        raise ConfigError([f"--gpu-memory: {text!r} is not a memory; expected e.g. 80GB or 80GiB"])
    return GpuMemory(float(num_bytes), "--gpu-memory")


def find_gpu_memory(text: str | None) -> GpuMemory:
    """What `--gpu-memory` names, or else the GPU that is there has, or else `DEFAULT_GPU_BYTES`.

    Raises:
        ConfigError: as `parse_gpu_memory`.
    """
    if text is not None:
        return parse_gpu_memory(text)
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return GpuMemory(float(device.total_memory), f"the {device.name} here")
    return GpuMemory(DEFAULT_GPU_BYTES, "assumed; --gpu-memory sets it")


def smallest_num_ranks(sizes: ModelSizes, config: Config, stage: int, gpu_bytes: float) -> int | None:
    """The fewest ranks onto which the run fits as configured, but at this stage; None where more ranks do not help."""

    def fits(num_ranks: int) -> bool:
        return plan_memory(sizes, config, stage, num_ranks).peak <= USABLE * gpu_bytes

    if fits(1):
        return 1
    if not fits(_MOST_RANKS):
        return None
    low, high = 2, _MOST_RANKS  # from two ranks on, when there is communication, more of them only make it less
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def fewest_lines(sizes: ModelSizes, config: Config, gpu_bytes: float) -> list[str]:
    """A line for each stage with the fewest GPUs that the configured run fits onto."""
    lines = []
    for stage in STAGES:
        fewest = smallest_num_ranks(sizes, config, stage, gpu_bytes)
        words = "does not fit on any number of GPUs" if fewest is None else f"fits on {fewest} and more"
        lines.append(f"ZeRO stage {stage}: {words}")
    return lines


def propose(sizes: ModelSizes, config: Config, num_gpus: int, gpu_bytes: float) -> Fit | None:
    """The cheapest settings that fit, with the largest micro-batch; None where none do.

    Checkpointing costs a third more FLOPs and comes after all stages; a higher stage costs communication. At stage 0
    nothing is shared, so it is proposed for one GPU only.
    """
    assert config.data.seq_len is not None
    samples_per_rank = math.ceil(config.train.global_batch_tokens // config.data.seq_len / num_gpus)
    most = 1 << (min(samples_per_rank, _MOST_ROWS).bit_length() - 1)
    for checkpointing in (False, True):
        for stage in (1, 2, 3) if num_gpus > 1 else (0, 1):
            micro_batch_size = most
            while micro_batch_size >= 1:
                changed = with_settings(config, stage, micro_batch_size, checkpointing)
                num_bytes = plan_memory(sizes, changed, stage, num_gpus).peak
                if num_bytes <= USABLE * gpu_bytes:
                    return Fit(stage, micro_batch_size, checkpointing, num_bytes)
                micro_batch_size //= 2
    return None


def with_settings(config: Config, stage: int, micro_batch_size: int, checkpointing: bool) -> Config:
    """The configuration with a proposal's settings."""
    train = {"micro_batch_size": micro_batch_size, "activation_checkpointing": checkpointing}
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "deepspeed": config.deepspeed.model_copy(update={"zero_stage": stage}),
        }
    )
