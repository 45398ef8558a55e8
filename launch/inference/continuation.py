"""Continues a text with a trained model."""

from __future__ import annotations

import argparse
import math
import sys

import torch

from launch.checkpoint.files import read_config
from launch.errors import RunError
from launch.inference import DEFAULT_NEW_TOKENS
from launch.inference.load_model import end_of_document_id, load_model, load_tokenizer
from model.generate import check_sampling, generate

_MAX_SEED = 2**63 - 1


def print_continuation(options: argparse.Namespace) -> None:
    """Prints the prompt and its continuation, token by token.

    Raises:
        RunError, ConfigError, ValueError, OSError: The checkpoint, the tokenizer or an option cannot be used.
    """
    if not math.isfinite(options.temperature):
        raise ValueError(f"--temperature is {options.temperature}; expected a finite number")
    check_sampling(options.temperature, options.top_p)
    if not 0 <= options.seed <= _MAX_SEED:
        raise ValueError(f"--seed is {options.seed}; expected 0 to {_MAX_SEED}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, checkpoint = load_model(
        options.checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    tokenizer = load_tokenizer(checkpoint, options.tokenizer, model.config.vocab_size)
    prompt = tokenizer.encode(options.prompt)
    new_tokens = generate(
        model,
        prompt,
        _num_new_tokens(options.max_new_tokens, len(prompt), model.config.max_seq_len),
        options.temperature,
        options.top_p,
        options.seed,
        eod_id=end_of_document_id(read_config(checkpoint), tokenizer),
        num_token_ids=tokenizer.vocab_size,
    )
    cache = model.new_cache(batch_size=1, length=1, device="meta")
    print(f"cache: {cache.num_bytes_per_token:,} bytes per token", file=sys.stderr)
    tokens = list(prompt)
    shown = ""
    for token in new_tokens:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # an incomplete multi-byte character
            print(text.removeprefix(shown), end="", flush=True)
            shown = text
    print(tokenizer.decode(tokens).removeprefix(shown))


def _num_new_tokens(wanted: int | None, num_prompt_tokens: int, max_seq_len: int) -> int:
    """The number of tokens to generate. (`generate` checks that the context is long enough.)

    Raises:
        ValueError: `wanted` is below 1.
        RunError: The prompt fills the context.
    """
    if wanted is not None and wanted < 1:
        raise ValueError(f"--max-new-tokens is {wanted}; expected at least 1")
    room = max_seq_len - num_prompt_tokens
    if room < 1:
        raise RunError(
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room in model.max_seq_len={max_seq_len}"
        )
    return min(DEFAULT_NEW_TOKENS, room) if wanted is None else wanted
