"""Measures how far the resident memory of a rank grows over three steps, case by case in one process group.

Usage, under a launcher or alone, with the environment of `memory_environment`: `memory_worker.py CASES.json`, where
CASES is a list of `[CONFIG.yaml, [key=value, …]]`. Rank 0 writes the bytes of every case to CASES.json.peaks.

Before each case a tiny model takes two steps with the same settings, so that what is imported and started on the way
(kernels, threads, gloo's buffers) is not counted. The peak is the kernel's VmHWM, which is reset before the case. With
a fixed mmap threshold glibc gives every tensor above 64 KiB pages of its own, and gives them back at once when it is
freed; with one arena no thread keeps others.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from configs.load import load_config
from configs.schema import Config
from data.loader import MicroBatch, StepBatch
from launch.distributed.process_group import leave, start_distributed
from launch.distributed.topology import Topology, detect_topology
from launch.engine.build import build_model
from launch.engine.deepspeed_config import accumulation_steps
from launch.engine.engine import Engine
from launch.optim.optimizer import group_learning_rates

NUM_STEPS = 3
TINY = ["dim=64", "num_layers=1", "num_heads=2", "head_dim=32", "ffn_dim=64", "vocab_size=64"]


def memory_environment() -> dict[str, str]:
    """Variables that must be set when the process starts."""
    return {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def process_bytes(key: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


def train(config: Config, topology: Topology, device: torch.device, num_steps: int) -> None:
    """Builds an engine, takes steps over random tokens, and closes it."""
    accumulation = accumulation_steps(config, topology.world_size)
    engine = Engine(build_model(config, topology, device), config, topology, device, accumulation)
    assert config.model.vocab_size is not None
    assert config.data.seq_len is not None
    shape = (config.train.micro_batch_size, config.data.seq_len)
    for step in range(num_steps):
        tokens = [torch.randint(config.model.vocab_size, shape) for _ in range(accumulation)]
        batch = StepBatch([MicroBatch(one, one) for one in tokens], 0, accumulation * math.prod(shape))
        engine.train_step(step, batch, group_learning_rates(step, config, engine.groups), 0.0, False)
    engine.close()


def growth(path: str, overrides: list[str], topology: Topology, device: torch.device) -> int:
    """Bytes by which the peak of one case exceeds what was resident before it."""
    tiny = [*overrides, *(f"model.{setting}" for setting in TINY)]
    train(load_config(path, tiny), topology, device, num_steps=2)
    config = load_config(path, overrides)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = process_bytes("VmRSS")
    train(config, topology, device, NUM_STEPS)
    peak = process_bytes("VmHWM") - before
    gc.collect()
    return peak


def main(cases_path: str) -> None:
    cases = json.loads(Path(cases_path).read_text())
    topology = detect_topology(os.environ)
    logging.disable(logging.WARNING)
    device = start_distributed(topology, load_config(*cases[0]))
    peaks = []
    for path, overrides in cases:
        peaks.append(growth(path, overrides, topology, device))
        if topology.is_main:
            Path(f"{cases_path}.peaks").write_text(json.dumps(peaks))
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
