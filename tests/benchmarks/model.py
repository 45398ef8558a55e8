"""Forward and backward speed of the model beside Hugging Face's Llama of the same shape, measured in one process.

Rounds of the two models alternate, so that a change of the machine's load hits both; the ratio is that of the median
rounds. Run from the repository root: `OMP_NUM_THREADS=1 python tests/benchmarks/model.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from model.gpt import GPT
from model.initialisation import initialise
from tests.benchmarks.common import add_shape_arguments, print_table, seconds, shape
from tests.benchmarks.llama import build_llama


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_shape_arguments(parser)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()

    config = shape(args)
    model = GPT(config)
    initialise(model, seed=0)
    llama = build_llama(config)
    tokens = torch.randint(args.vocab, (args.batch, args.seq))
    targets = torch.roll(tokens, -1, dims=1)

    def our_step() -> None:
        model.zero_grad()
        objective_sum, _, _ = model(tokens, targets)
        (objective_sum / targets.numel()).backward()

    def llama_step() -> None:
        llama.zero_grad()
        llama(tokens, labels=tokens).loss.backward()

    our_seconds, llama_seconds = [], []
    for round_index in range(args.rounds + 1):
        our_time, llama_time = seconds(our_step), seconds(llama_step)
        if round_index > 0:  # the first one warms up
            our_seconds.append(our_time)
            llama_seconds.append(llama_time)

    print(f"fp32, {torch.get_num_threads()} thread(s), {model.num_parameters:,} parameters, {args.rounds} rounds")
    rows = []
    for name, values in (("model.gpt.GPT", our_seconds), ("LlamaForCausalLM", llama_seconds)):
        median = statistics.median(values)
        rate = tokens.numel() / median
        rows.append((name, f"{rate:,.0f}", f"{median:.3f}", f"{min(values):.3f}", f"{max(values):.3f}"))
    print_table(("forward + backward", "tokens/s", "seconds: median", "fastest", "slowest"), rows)
    print(f"ratio of tokens/s: {statistics.median(llama_seconds) / statistics.median(our_seconds):.3f}")


if __name__ == "__main__":
    main()
