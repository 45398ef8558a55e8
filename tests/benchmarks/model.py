"""Training speed of the model beside Hugging Face's Llama of the same shape, measured in one process.

Rounds of the two models alternate, so that a change of the machine's load hits both; the ratio is that of the median
rounds. Run from the repository root: `OMP_NUM_THREADS=1 python tests/benchmarks/model.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from configs.schema import ModelConfig, resolve_model
from model.gpt import GPT
from model.initialisation import initialise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=None, help="default: as many as --heads")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()

    config = resolve_model(
        ModelConfig(
            vocab_size=args.vocab,
            dim=args.dim,
            num_layers=args.layers,
            num_heads=args.heads,
            num_kv_heads=args.kv_heads,
            max_seq_len=args.seq,
        )
    )
    model = GPT(config)
    initialise(model, seed=0)
    llama = LlamaForCausalLM(llama_config(config))
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

    our_median, llama_median = statistics.median(our_seconds), statistics.median(llama_seconds)
    print(f"fp32, {torch.get_num_threads()} thread(s), {model.num_parameters:,} parameters, {args.rounds} rounds")
    print(f"{'forward + backward':<20} {'tokens/s':>10} {'seconds: median':>16} {'fastest':>8} {'slowest':>8}")
    for name, values in (("model.gpt.GPT", our_seconds), ("LlamaForCausalLM", llama_seconds)):
        median = statistics.median(values)
        rate = tokens.numel() / median
        print(f"{name:<20} {rate:>10,.0f} {median:>16.3f} {min(values):>8.3f} {max(values):>8.3f}")
    print(f"ratio of tokens/s    {llama_median / our_median:>10.3f}")


def llama_config(config: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
