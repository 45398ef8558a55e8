"""Checks the parts of query/key control that need a GPU, and measures its overhead there.

- Softcap by FlexAttention, with and without a sink: outputs and gradients against plain matrix products.
- A sink by the fused kernel, in bf16: the same.
- Document masks by FlexAttention, eager and compiled: the same against separate calls for each document.
- Newton-Schulz in bf16 against fp32.
- Steps of a small model in bf16 with each control, in alternating rounds.

Run from the repository root: `python tests/gpu/control.py`, at most two minutes. `--dry` runs the same on the CPU, with
other kernels.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from configs.load import load_config
from launch.distributed.process_group import start_distributed
from launch.distributed.topology import detect_topology
from launch.training.data import open_data
from model.attention.causal import causal_attention
from model.attention.documents import Documents
from model.attention.softcap import chunked_softcap_attention
from model.stability.orthogonal import orthogonalise
from tests.benchmarks.common import EngineLoop, print_table, write_shard
from tests.benchmarks.control import CONTROLS
from tests.benchmarks.engine import alternate

# Relative Frobenius error; bf16 has 8 bits of precision.
TOLERANCE = 2e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    device = torch.device("cpu" if args.dry else "cuda")
    rows = [*attention_errors(device, args.dry), *document_errors(device, args.dry)]
    rows += orthogonalise_errors(device, args.dry)
    print_table(("check", "relative error", "at most", "passed"), rows)
    measure_steps(args.rounds, args.dry)


def attention_errors(device: torch.device, is_dry: bool) -> list[tuple[str, str, str, str]]:
    """Errors of outputs and gradients with each option, in bf16 against plain products in fp32."""
    B, H, G, T, K = (1, 4, 2, 32, 16) if is_dry else (2, 16, 4, 1024, 64)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    inputs = [2 * random(B, H, T, K), 2 * random(B, G, T, K), random(B, G, T, K)]
    sink_H, upstream = random(H), random(B, H, T, K)
    rows = []
    for softcap, has_sink in ((20.0, False), (20.0, True), (None, True)):
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            leaves = [part.to(dtype).requires_grad_() for part in (*inputs, sink_H)]
            sink = leaves[3] if has_sink else None
            # A cap far above all logits has no effect, so it serves as the reference for a sink without a cap.
            if dtype == torch.float32:
                out = chunked_softcap_attention(*leaves[:3], softcap or 1e6, sink)
            else:
                out = causal_attention(*leaves[:3], softcap, sink)
            used = leaves if has_sink else leaves[:3]
            results.append([out, *torch.autograd.grad(out, used, upstream.to(dtype))])
        names = ["output", "query", "key", "value", "sink"]
        for name, expected, found in zip(names, *results, strict=False):
            rows.append(_row(f"softcap={softcap} sink={has_sink}: {name}", found, expected))
    return rows


def document_errors(device: torch.device, is_dry: bool) -> list[tuple[str, str, str, str]]:
    """The same with several documents of different lengths in each row, against separate calls in fp32."""
    B, H, G, T, K, V = (1, 4, 2, 32, 16, 16) if is_dry else (4, 16, 4, 1000, 64, 128)
    generator = torch.Generator(device).manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    inputs, upstream = (
        [2 * random(B, H, T, K), 2 * random(B, G, T, K), random(B, G, T, V), random(H)],
        random(B, H, T, V),
    )
    tokens_T = torch.arange(T, device=device)
    starts_BT = (torch.rand(B, T, generator=generator, device=device) < 0.01) | (tokens_T == 0)
    positions_BT = (tokens_T - torch.where(starts_BT, tokens_T, 0).cummax(dim=1).values).int()
    compiled = torch.compile(causal_attention)
    rows = []
    for softcap, has_sink in ((None, False), (20.0, False), (None, True), (20.0, True)):
        results = []
        for dtype, attend in (
            (torch.float32, causal_attention),
            (torch.bfloat16, causal_attention),
            (torch.bfloat16, compiled),
        ):
            leaves = [part.to(dtype).requires_grad_() for part in inputs]
            is_reference = dtype == torch.float32
            documents = Documents(positions_BT) if is_reference else Documents.of(positions_BT, has_sink)
            out = attend(*leaves[:3], softcap, leaves[3] if has_sink else None, documents)
            used = leaves if has_sink else leaves[:3]
            results.append([out, *torch.autograd.grad(out, used, upstream.to(dtype))])
        names = ["output", "query", "key", "value", "sink"]
        for kind, result in (("", results[1]), (" compiled", results[2])):
            for name, expected, found in zip(names, results[0], result, strict=False):
                rows.append(_row(f"documents{kind} softcap={softcap} sink={has_sink}: {name}", found, expected))
    return rows


def orthogonalise_errors(device: torch.device, is_dry: bool) -> list[tuple[str, str, str, str]]:
    """Newton-Schulz in bf16 against fp32."""
    shape = (2, 32, 48) if is_dry else (4, 1024, 2048)
    matrices = torch.randn(shape, generator=torch.Generator(device).manual_seed(1), device=device)
    found = orthogonalise(matrices, dtype=torch.bfloat16)
    return [_row("orthogonalise", found, orthogonalise(matrices))]


def _row(name: str, found: Tensor, expected: Tensor) -> tuple[str, str, str, str]:
    error = float((found.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm())
    return name, f"{error:.1e}", f"{TOLERANCE:.0e}", "yes" if error <= TOLERANCE else "NO"


def measure_steps(num_rounds: int, is_dry: bool) -> None:
    """Prints the time of a step with each kind of control."""
    dim, layers, tokens, length = (64, 2, 512, 64) if is_dry else (768, 12, 65_536, 1024)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shard = write_shard(folder / "shard", tokens * (num_rounds + 4), 8192)
        settings = {
            "run": {"dir": str(folder), "name": "control"},
            "model": {"vocab_size": 8192, "dim": dim, "num_layers": layers, "num_heads": 4, "max_seq_len": length},
            "optim": {"warmup_steps": 2},
            "data": {"sources": [{"path": str(shard)}]},
            "train": {"steps": num_rounds + 1, "global_batch_tokens": tokens, "micro_batch_size": 8},
        }
        (folder / "control.yaml").write_text(yaml.safe_dump(settings))
        configs = {
            control: load_config(folder / "control.yaml", ["monitor.every_steps=null", *overrides])
            for control, overrides in CONTROLS.items()
        }
        topology = detect_topology(os.environ)
        device = start_distributed(topology, configs["none"])
        loops = {}
        for control, config in configs.items():
            data, config = open_data(config)
            loops[control] = EngineLoop(config, data, topology, device)
        seconds = alternate({control: loop.step for control, loop in loops.items()}, num_rounds)
        for loop in loops.values():
            loop.read_pending()
            loop.close()
    medians = {control: statistics.median(values) for control, values in seconds.items()}
    print_table(
        ("step", "median s", "vs none"),
        [(control, f"{median:.4f}", f"{median / medians['none']:.3f}") for control, median in medians.items()],
    )


if __name__ == "__main__":
    main()
