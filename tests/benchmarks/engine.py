"""Measures the engine's training speed against bare PyTorch and Hugging Face's Llama, and the start time of commands.

One process on the CPU, fp32. Rounds alternate (engine, bare loop, Llama, engine, …), so that a change in the machine's
load affects all of them; ratios are those of the median rounds. All use the same optimizer (fused AdamW), clipping and
micro-batches; the engine's time includes its loader, learning rates and reports.

Targets: at least 0.95 of the bare loop and 1.0 of Llama; `--dry-run` in at most 1.5 times an `import torch`, `--help`
in less than a second.

Run from the repository root: `OMP_NUM_THREADS=1 python tests/benchmarks/engine.py`.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import yaml
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from configs.load import load_config
from configs.schema import Config
from data.loader import StepBatch
from launch.distributed.process_group import start_distributed
from launch.distributed.topology import detect_topology
from launch.training.data import batch_geometry, open_data, training_batches
from tests.benchmarks.common import (
    BareLoop,
    EngineLoop,
    add_shape_arguments,
    print_table,
    seconds,
    shape,
    write_shard,
)
from tests.benchmarks.llama import build_llama

ROOT = Path(__file__).parents[2]
CONFIG_FILE = "benchmark.yaml"
BARE = "bare loop, model.gpt.GPT"
LLAMA = "bare loop, LlamaForCausalLM"


class LlamaLoop:
    """A bare PyTorch loop with Hugging Face's Llama."""

    def __init__(self, config: Config, batches: Sequence[StepBatch]) -> None:
        self._model = build_llama(config.model)
        self._batches = batches
        self._grad_clip = config.optim.grad_clip
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps, fused=True
        )
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """Runs one optimizer step."""
        batch = self._batches[len(self.losses)]
        losses = []
        for micro_batch in batch.micro_batches:
            loss = self._model(micro_batch.tokens, labels=micro_batch.tokens).loss / len(batch.micro_batches)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(torch.stack(losses).sum())


def main() -> None:
    args = parse_arguments()
    if not args.only_commands:
        with tempfile.TemporaryDirectory() as folder:
            measure_training(args, Path(folder))
    if args.command_runs:
        measure_commands(args.command_runs)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences per micro-batch")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--command-runs", type=int, default=7, help="runs of each command (0: none)")
    parser.add_argument("--only-commands", action="store_true", help="measure only the commands")
    return parser.parse_args()


def measure_training(args: argparse.Namespace, folder: Path) -> None:
    """Prints tokens/s of all loops."""
    logging.disable(logging.WARNING)
    config = write_config(args, folder)
    topology = detect_topology(os.environ)
    device = start_distributed(topology, config)
    data, config = open_data(config)
    geometry = batch_geometry(config, topology.world_size)
    with training_batches(data, config, geometry, 0, 0, torch.device("cpu")) as loader:
        batches = [next(loader) for _ in range(args.rounds + 1)]

    engines = {
        f"engine, ZeRO stage {stage}": EngineLoop(at_stage(config, stage), data, topology, device) for stage in (0, 1)
    }
    bare = BareLoop(config, batches, device)
    llama = LlamaLoop(config, batches)
    steps = {**{name: loop.step for name, loop in engines.items()}, BARE: bare.step, LLAMA: llama.step}
    round_seconds = alternate(steps, args.rounds)
    for loop in engines.values():
        loop.read_pending()
        loop.close()
    losses = {name: loop.reports[-1].loss for name, loop in engines.items()}
    losses |= {BARE: float(bare.losses[-1]), LLAMA: float(llama.losses[-1])}
    torch.distributed.destroy_process_group()

    print(
        f"fp32, {torch.get_num_threads()} thread(s), {config.train.global_batch_tokens:,} tokens per step in "
        f"{args.accumulation} micro-batches, {args.rounds} rounds"
    )
    medians = {name: statistics.median(values) for name, values in round_seconds.items()}
    rows = []
    for name, values in round_seconds.items():
        rate = config.train.global_batch_tokens / medians[name]
        spread = f"{min(values):.3f}-{max(values):.3f}"
        ratios = [f"{medians[other] / medians[name]:.3f}" for other in (BARE, LLAMA)]
        rows.append((name, f"{rate:,.0f}", f"{medians[name]:.3f}", spread, *ratios, f"{losses[name]:.6f}"))
    print_table(("step", "tokens/s", "median s", "range s", "vs bare", "vs Llama", "last loss"), rows)


def write_config(args: argparse.Namespace, folder: Path) -> Config:
    """Writes and loads the configuration for the arguments, with a shard that has new tokens for every step."""
    batch_tokens = args.seq * args.micro_batch * args.accumulation
    shard = write_shard(folder / "shard", batch_tokens * (args.rounds + 4), args.vocab)
    settings = {
        "run": {"dir": str(folder)},
        "model": shape(args).model_dump(mode="json"),
        "optim": {"warmup_steps": 2},
        "data": {"sources": [{"path": str(shard)}]},
        "train": {
            "steps": args.rounds + 1,
            "global_batch_tokens": batch_tokens,
            "micro_batch_size": args.micro_batch,
            "precision": "fp32",
        },
    }
    path = folder / CONFIG_FILE
    path.write_text(yaml.safe_dump(settings))
    return load_config(path)


def at_stage(config: Config, stage: int) -> Config:
    """Returns the configuration at another ZeRO stage."""
    return config.model_copy(update={"deepspeed": config.deepspeed.model_copy(update={"zero_stage": stage})})


def alternate(steps: dict[str, Callable[[], None]], num_rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every step in every round; an additional first round warms up."""
    result: dict[str, list[float]] = {name: [] for name in steps}
    for round_index in range(num_rounds + 1):
        for name, step in steps.items():
            elapsed = seconds(step)
            if round_index > 0:
                result[name].append(elapsed)
    return result


def measure_commands(num_runs: int) -> None:
    """Prints how long the quick commands of train.py take, compared with `import torch`."""
    reference = "python -c 'import torch'"
    commands = {
        reference: ["-c", "import torch"],
        "python train.py CONFIG --dry-run": ["train.py", "configs/quickstart.yaml", "--dry-run"],
        "python train.py --help": ["train.py", "--help"],
    }

    def run(arguments: list[str]) -> None:
        subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)

    runs = {name: functools.partial(run, arguments) for name, arguments in commands.items()}
    run_seconds = alternate(runs, num_runs)
    medians = {name: statistics.median(values) for name, values in run_seconds.items()}
    rows = [
        (name, f"{median:.2f}", f"{median / medians[reference]:.2f}", f"{min(values):.2f}-{max(values):.2f}")
        for (name, median), values in zip(medians.items(), run_seconds.values(), strict=True)
    ]
    print()
    print_table(("command", "median s", "vs import torch", "range s"), rows)


if __name__ == "__main__":
    main()
