"""`--plan`: which ZeRO stage, micro-batch and checkpointing fit a run onto GPUs of a given size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from configs.errors import ConfigError
from configs.schema import Config
from launch.plan import GIGABYTE, accumulation_steps, count_muon, memory_bytes, with_vocabulary
from model.gpt import GPT

USABLE = 0.9  # of a GPU's memory; the rest is for buffers of libraries, fragmentation and what the estimate misses
_MOST_RANKS = 1 << 16
_MOST_ROWS = 64  # sequences of a micro-batch: more bring no speed
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?(GB|GiB)")


@dataclass(frozen=True)
class Fit:
    """Settings that fit.

    Attributes:
        num_bytes: of one rank.
    """

    zero_stage: int
    micro_batch_size: int
    activation_checkpointing: bool
    num_bytes: float


def print_fit(config: Config, num_gpus: str | None, gpu_memory: str | None) -> None:
    """Prints a proposal, and for each stage the smallest number of GPUs that the configured run fits onto.

    Raises:
        ConfigError: for arguments that are no number or no memory, and where nothing fits.
    """
    if num_gpus is None or gpu_memory is None:
        raise ConfigError(["--plan: expected --gpus N and --gpu-memory, e.g. 80GB"])
    problems = []
    if not num_gpus.isdecimal() or int(num_gpus) == 0:
        problems.append(f"--gpus: {num_gpus!r} is not a whole number from 1 on")
    match = _MEMORY.fullmatch(gpu_memory)
    if match is None:
        problems.append(f"--gpu-memory: {gpu_memory!r} is not a memory; expected e.g. 80GB or 80GiB")
    if problems or match is None:
        raise ConfigError(problems)
    gpu_bytes = float(match[1]) * (GIGABYTE if match[2] == "GB" else 2**30)
    config, notes = with_vocabulary(config)
    with torch.device("meta"):
        model = GPT(config.model)
    num_muon = count_muon(model, config)
    print("\n".join([*notes, f"{model.num_parameters:,} parameters; {USABLE:.0%} of {gpu_memory} are used"]))
    for stage in (0, 1, 2, 3):
        fewest = smallest_num_ranks(model.num_parameters, config, stage, gpu_bytes, num_muon)
        print(f"ZeRO stage {stage}: " + ("does not fit, however many" if fewest is None else f"fits {fewest} and more"))
    fit = propose(model.num_parameters, config, int(num_gpus), gpu_bytes, num_muon)
    if fit is None:
        raise ConfigError([f"--gpus: {num_gpus} of {gpu_memory} are too few for this model and sequence length"])
    proposed = _with(config, fit.zero_stage, fit.micro_batch_size, fit.activation_checkpointing)
    print(
        f"proposal for {num_gpus}: deepspeed.zero_stage={fit.zero_stage} "
        f"train.micro_batch_size={fit.micro_batch_size} "
        f"train.activation_checkpointing={str(fit.activation_checkpointing).lower()}\n"
        f"about {fit.num_bytes / GIGABYTE:.1f} GB a rank, "
        f"{accumulation_steps(proposed, int(num_gpus))} micro-batches a step"
    )


def smallest_num_ranks(
    num_parameters: int, config: Config, stage: int, gpu_bytes: float, num_muon: int = 0
) -> int | None:
    """The fewest ranks onto which the run fits as configured, but at this stage; None where more ranks do not help."""

    def fits(num_ranks: int) -> bool:
        parts = memory_bytes(num_parameters, config, stage, num_ranks, num_muon)
        return sum(parts.values()) <= USABLE * gpu_bytes

    if not fits(_MOST_RANKS):
        return None
    low, high = 1, _MOST_RANKS  # a rank's share only falls with their number
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def propose(num_parameters: int, config: Config, num_gpus: int, gpu_bytes: float, num_muon: int = 0) -> Fit | None:
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
                changed = _with(config, stage, micro_batch_size, checkpointing)
                num_bytes = sum(memory_bytes(num_parameters, changed, stage, num_gpus, num_muon).values())
                if num_bytes <= USABLE * gpu_bytes:
                    return Fit(stage, micro_batch_size, checkpointing, num_bytes)
                micro_batch_size //= 2
    return None


def _with(config: Config, stage: int, micro_batch_size: int, checkpointing: bool) -> Config:
    train = {"micro_batch_size": micro_batch_size, "activation_checkpointing": checkpointing}
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "deepspeed": config.deepspeed.model_copy(update={"zero_stage": stage}),
        }
    )
