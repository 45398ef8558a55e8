"""Measures checkpoints: saving against `torch.save`, verification, and resuming against a fresh start.

The first table compares actions in one process on the CPU, in alternating rounds. `torch.save` writes the same tensors
to one file, which is then hashed with xxh3 as a checkpoint is, but not synced to disk. The second table has the time
from the start of `train.py` to its first step.

Targets: saving at most 1.5 times `torch.save`; verification at 1 GB/s; the first step of a resumed run after at most
1.5 times the sum of a fresh start and reading the checkpoint's bytes.

Run from the repository root: `OMP_NUM_THREADS=1 python tests/benchmarks/checkpoint.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from configs.schema import Config
from data.files import hash_file
from launch.checkpoint.files import find_checkpoint, find_faults, read_state
from launch.checkpoint.restore import restore
from launch.checkpoint.save import save_checkpoint
from launch.distributed.process_group import start_distributed
from launch.distributed.topology import detect_topology
from launch.engine.build import build_model
from launch.engine.engine import Engine
from launch.run_folder.observe import read_records
from launch.training.data import batch_geometry, open_data
from tests.benchmarks.common import add_shape_arguments, print_table
from tests.benchmarks.engine import CONFIG_FILE, alternate, write_config

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.set_defaults(dim=768, layers=8, heads=12)
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences per micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.accumulation = 1
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(args, Path(folder))
        starts = measure_starts(Path(folder), args.rounds)
        checkpoint = find_checkpoint(Path(folder) / "fresh_0")
        measure_saves(config, checkpoint, Path(folder), args.rounds)
    print()
    rows = [(name, f"{statistics.median(values):.2f}") for name, values in starts.items()]
    fresh, resumed, reading = (statistics.median(values) for values in starts.values())
    rows.append(("resumed / (fresh + reading)", f"{resumed / (fresh + reading):.3f}"))
    print_table(("from the start of the process to its first step", "median s"), rows)


def measure_starts(folder: Path, num_rounds: int) -> dict[str, list[float]]:
    """Returns the seconds to the first step of fresh and resumed runs, and to read a checkpoint's files once."""
    seconds: dict[str, list[float]] = {"fresh": [], "resumed": [], "reading the checkpoint's bytes": []}
    for index in range(num_rounds):
        run = folder / f"fresh_{index}"
        for step, name in ((1, "fresh"), (2, "resumed")):
            seconds[name].append(seconds_to_step(folder / CONFIG_FILE, run, step))
        start = time.perf_counter()
        for path in find_checkpoint(run).iterdir():
            path.read_bytes()
        seconds["reading the checkpoint's bytes"].append(time.perf_counter() - start)
    return seconds


def seconds_to_step(config: Path, run: Path, step: int) -> float:
    """Starts `train.py` with a stop after `step`; returns the seconds until the step was recorded."""
    command = [sys.executable, "train.py", str(config), f"run.name={run.name}", f"train.stop_step={step}"]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not any(record["step"] == step for record in read_records(run)):
        assert process.poll() is None, f"{command} failed"
        time.sleep(POLL_SECONDS)
    elapsed = time.perf_counter() - start
    assert process.wait() == 0
    return elapsed


def measure_saves(config: Config, checkpoint: Path, folder: Path, num_rounds: int) -> None:
    """Prints a table of saving and verifying a checkpoint."""
    topology = detect_topology(os.environ)
    device = start_distributed(topology, config)
    data, config = open_data(config)
    model = build_model(config, topology, device)
    engine = Engine(model, config, topology, device, batch_geometry(config, topology.world_size).accumulation)
    restore(engine, checkpoint)
    state, checkpoints = read_state(checkpoint), folder / "run/checkpoints"
    checkpoints.parent.mkdir()
    tensors = [shard.flat for shard in engine.shards()]
    tensors = list({id(flat): flat for flat in tensors}.values())
    moments = [engine.base_optimizer.state[flat] for flat in tensors]
    plain = folder / "plain.pt"
    step = 100

    def save_checkpoint_files() -> None:
        nonlocal step
        step += 1
        save_checkpoint(checkpoints, engine, config, replace(state, step=step), data.tokenizer)

    def save_by_torch() -> None:
        torch.save({"weights": tensors, "moments": moments}, plain)
        hash_file(plain)

    def verify() -> None:
        assert find_faults(find_checkpoint(folder / "run")) == []

    actions = {"torch.save and hash": save_by_torch, "save_checkpoint": save_checkpoint_files, "verification": verify}
    seconds = {name: statistics.median(values) for name, values in alternate(actions, num_rounds).items()}
    num_bytes = sum(path.stat().st_size for path in find_checkpoint(folder / "run").iterdir())
    torch.distributed.destroy_process_group()
    reference = seconds["torch.save and hash"]
    print(
        f"a checkpoint of {num_bytes / 1e9:.2f} GB, {num_rounds} rounds (torch.save: {plain.stat().st_size / 1e9:.2f})"
    )
    rows = [
        (name, f"{value:.3f}", f"{num_bytes / value / 1e9:.2f}", f"{value / reference:.3f}")
        for name, value in seconds.items()
    ]
    print_table(("action", "median s", "GB/s", "vs torch.save"), rows)


if __name__ == "__main__":
    main()
