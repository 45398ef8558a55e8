"""What query/key control costs: training steps of our engine with and without it.

One process on the CPU, fp32, in alternating rounds; ratios are to `none` at the same ZeRO stage. Of the two rows for
clipping, one has a threshold that no logit's bound reaches, and shows the cost of watching.

Targets: `quack` at most 3 % of a step, clipping that never clips at most 5 %.

Run from the repository root: `OMP_NUM_THREADS=1 python tests/benchmarks/control.py`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from configs.load import load_config
from launch.engine import start_distributed
from launch.topology import detect_topology
from launch.training_data import open_data
from tests.benchmarks.common import EngineLoop, add_shape_arguments, print_table
from tests.benchmarks.engine import CONFIG_FILE, alternate, write_config

CONTROLS = {
    "none": [],
    "constant": ["qk_control.policy=constant"],
    "quack": ["qk_control.policy=quack"],
    "adaptive": ["qk_control.policy=adaptive"],
    "clip, nothing clips": ["qk_control.clip_threshold=1.0e+4"],
    "clip, every head computed": ["qk_control.clip_threshold=1.0e-4"],
    "monitor every 10 steps": ["monitor.every_steps=10"],
    "muon": ["optim.name=muon"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1], help="ZeRO stages")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(args, Path(folder))
        topology = detect_topology(os.environ)
        device = start_distributed(topology, config)
        loops = {}
        for stage, (name, overrides) in itertools.product(args.stages, CONTROLS.items()):
            settings = ["monitor.every_steps=null", f"deepspeed.zero_stage={stage}", *overrides]
            data, chosen = open_data(load_config(Path(folder) / CONFIG_FILE, settings))
            loops[f"stage {stage}, {name}"] = EngineLoop(chosen, data, topology, device)
        seconds = alternate({name: loop.step for name, loop in loops.items()}, args.rounds)
        for loop in loops.values():
            loop.read_pending()
            loop.close()
        first = next(iter(loops.values())).engine.parameter_shapes().values()
        num_parameters = sum(math.prod(shape) for shape in first)
        torch.distributed.destroy_process_group()
    print(
        f"{num_parameters / 1e6:.1f}M parameters, fp32, {torch.get_num_threads()} thread(s), "
        f"{config.train.global_batch_tokens:,} tokens a step, {args.rounds} rounds"
    )
    # Means: the probes of `adaptive` and of the monitor fall into every tenth step only.
    means = {name: statistics.mean(values) for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name, values in seconds.items():
        reference = f"{name.split(',')[0]}, none"
        ratios = [f"{table[name] / table[reference]:.3f}" for table in (medians, means)]
        rows.append((name, f"{medians[name]:.3f}", f"{min(values):.3f}-{max(values):.3f}", *ratios))
    print_table(("step", "median s", "range s", "median of none", "mean of none"), rows)


if __name__ == "__main__":
    main()
