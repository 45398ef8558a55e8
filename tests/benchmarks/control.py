"""Measures the overhead of query/key control: training steps with and without it.

One process on the CPU, fp32, in alternating rounds; ratios are relative to `none` at the same ZeRO stage. Of the two
rows for clipping, one has a threshold that no logit's bound reaches, and so shows the cost of the bound alone.

The monitor measures every second step here, but every hundredth by default. So its overhead is the extra time of a step
with a measurement, relative to `none` in the same round, divided by a hundred.

Targets: at most 3% of a step for `quack`, 5% for clipping that never clips, 2% for the monitor.

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
from configs.schema import MonitorConfig
from launch.distributed.process_group import start_distributed
from launch.distributed.topology import detect_topology
from launch.training.data import open_data
from tests.benchmarks.common import EngineLoop, add_shape_arguments, print_table
from tests.benchmarks.engine import CONFIG_FILE, alternate, write_config

NONE = "none"
MONITOR = "monitor"
MONITOR_STEPS = 2
CONTROLS = {
    NONE: [],
    "constant": ["qk_control.policy=constant"],
    "quack": ["qk_control.policy=quack"],
    "adaptive": ["qk_control.policy=adaptive"],
    "clip, nothing clips": ["qk_control.clip_threshold=1.0e+4"],
    "clip, every head computed": ["qk_control.clip_threshold=1.0e-4"],
    MONITOR: [f"monitor.every_steps={MONITOR_STEPS}"],
    "muon": ["optim.name=muon"],
    "muon and constant": ["optim.name=muon", "qk_control.policy=constant"],
    "muon and quack": ["optim.name=muon", "qk_control.policy=quack"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences per micro-batch")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1], help="ZeRO stages")
    parser.add_argument("--controls", nargs="+", choices=CONTROLS, default=list(CONTROLS), help="default: all")
    args = parser.parse_args()
    names = list(dict.fromkeys([NONE, *args.controls]))
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(args, Path(folder))
        topology = detect_topology(os.environ)
        device = start_distributed(topology, config)
        loops = {}
        for stage, name in itertools.product(args.stages, names):
            settings = ["monitor.every_steps=null", f"deepspeed.zero_stage={stage}", *CONTROLS[name]]
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
        f"{config.train.global_batch_tokens:,} tokens per step, {args.rounds} rounds"
    )
    # Means too, since `adaptive` measures only every tenth step.
    means = {name: statistics.mean(values) for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name, values in seconds.items():
        reference = f"{name.split(',')[0]}, {NONE}"
        ratios = [f"{table[name] / table[reference]:.3f}" for table in (medians, means)]
        rows.append((name, f"{medians[name]:.3f}", f"{min(values):.3f}-{max(values):.3f}", *ratios))
    print_table(("step", "median s", "range s", "median vs none", "mean vs none"), rows)
    if MONITOR in names:
        for stage in args.stages:
            none, monitored = (seconds[f"stage {stage}, {name}"] for name in (NONE, MONITOR))
            print_measurement(f"stage {stage}", none, monitored)


def print_measurement(name: str, none: list[float], monitored: list[float]) -> None:
    """Prints the cost of a measurement, from the rounds that have one; the first round is step 2, after the warm-up."""
    default = MonitorConfig().every_steps
    assert default is not None
    extra = [monitored[i] - none[i] for i in range(len(none)) if (i + 2) % MONITOR_STEPS == 0]
    cost = statistics.median(extra)
    share = cost / (default * statistics.median(none))
    print(f"{name}: a measurement takes {cost:.3f} s, {share:.2%} of the default interval of {default} steps")


if __name__ == "__main__":
    main()
