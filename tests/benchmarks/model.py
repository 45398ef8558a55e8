"""Measures the model's forward and backward speed against a Hugging Face model of the same shape, in one process.

That model is Llama for multi-head attention, and DeepSeek-V3 without experts for latent attention.

Rounds of the two models alternate, so that a change in the machine's load affects both; the ratio is that of the median
rounds. Run from the repository root: `OMP_NUM_THREADS=1 python tests/benchmarks/model.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from configs.schema import AttentionConfig, MlaConfig, resolve_model
from model.gpt import GPT
from model.initialisation import initialise
from tests.benchmarks.common import add_shape_arguments, print_table, seconds, shape
from tests.benchmarks.llama import build_llama
from tests.model.attention.deepseek import build_deepseek


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_shape_arguments(parser)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--attention", choices=("mha", "mla"), default="mha")
    parser.add_argument(
        "--q-latent", type=int, default=None, help="latent width of the queries with mla (default: none)"
    )
    args = parser.parse_args()

    attention = AttentionConfig(kind=args.attention, mla=MlaConfig(q_latent_dim=args.q_latent))
    config = resolve_model(shape(args).model_copy(update={"attention": attention}))
    model = GPT(config)
    initialise(model, seed=0)
    twin = build_deepseek(config) if args.attention == "mla" else build_llama(config)
    tokens = torch.randint(args.vocab, (args.batch, args.seq))
    targets = torch.roll(tokens, -1, dims=1)

    def our_step() -> None:
        model.zero_grad()
        objective_sum, _, _ = model(tokens, targets)
        (objective_sum / targets.numel()).backward()

    def twin_step() -> None:
        twin.zero_grad()
        twin(tokens, labels=tokens).loss.backward()

    our_seconds, twin_seconds = [], []
    for round_index in range(args.rounds + 1):
        our_time, twin_time = seconds(our_step), seconds(twin_step)
        if round_index > 0:  # the first round warms up
            our_seconds.append(our_time)
            twin_seconds.append(twin_time)

    print(f"fp32, {torch.get_num_threads()} thread(s), {model.num_parameters:,} parameters, {args.rounds} rounds")
    rows = []
    for name, values in (("model.gpt.GPT", our_seconds), (type(twin).__name__, twin_seconds)):
        median = statistics.median(values)
        rate = tokens.numel() / median
        rows.append((name, f"{rate:,.0f}", f"{median:.3f}", f"{min(values):.3f}", f"{max(values):.3f}"))
    print_table(("forward + backward", "tokens/s", "seconds: median", "fastest", "slowest"), rows)
    print(f"ratio of tokens/s: {statistics.median(twin_seconds) / statistics.median(our_seconds):.3f}")


if __name__ == "__main__":
    main()
