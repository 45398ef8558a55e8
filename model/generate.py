"""Sampling text from a model, token by token.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.gpt import GPT


def check_sampling(temperature: float, top_p: float) -> None:
    """Raises ValueError unless temperature is finite and non-negative and top_p is in (0, 1]."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; expected 0 or more, and finite")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; expected a number above 0 and at most 1")


def sample_next(
    logits_BV: Tensor, temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draws one token id per row (B).

    Args:
        logits_BV: Logits of the next token.
        temperature: Divides the logits; 0 picks the most likely token.
        top_p: Draw only from the smallest set of most likely tokens whose probabilities sum to at least top_p
            (nucleus sampling, Holtzman et al., arXiv 1904.09751).
        generator: Random number generator on the logits' device.

    Raises:
        ValueError: temperature or top_p is out of range.
    """
    check_sampling(temperature, top_p)
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    # With the largest score shifted to 0 and in fp64, scores can only overflow to minus infinity.
    logits_BV = logits_BV.double()
    scores_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature
    probabilities_BV, ids_BV = scores_BV.softmax(dim=-1).sort(dim=-1, descending=True)
    probability_before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    probabilities_BV = probabilities_BV.masked_fill(probability_before_BV >= top_p, 0.0)
    choice_B1 = torch.multinomial(probabilities_BV, num_samples=1, generator=generator)
    return ids_BV.gather(1, choice_B1).squeeze(1)


def generate(
    model: GPT,
    tokens: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    eod_id: int | None = None,
    num_token_ids: int | None = None,
) -> Iterator[int]:
    """Continues a prompt, yielding every new token id as soon as it is drawn.

    Sampling happens on the CPU, so that a seed draws from the same random numbers on every device.

    Args:
        model: The model, which is not modified.
        tokens: Token ids of the prompt, at least one.
        max_new_tokens: Maximum number of new tokens.
        temperature, top_p: See `sample_next`.
        seed: Seed of the random draws.
        eod_id: End-of-document id; generation stops when it is drawn, without yielding it. None: never.
        num_token_ids: Number of ids in the tokenizer; padding ids of the vocabulary beyond them are never drawn.

    Raises:
        ValueError: temperature or top_p is out of range, the prompt is empty, or the prompt and max_new_tokens
            together exceed max_seq_len.
    """
    check_sampling(temperature, top_p)
    if not tokens:
        raise ValueError("the prompt is empty; expected at least one token")
    max_seq_len = model.config.max_seq_len
    if len(tokens) + max_new_tokens > max_seq_len:
        raise ValueError(
            f"{len(tokens)} prompt tokens and {max_new_tokens} new tokens are more than model.max_seq_len {max_seq_len}"
        )
    generator = torch.Generator().manual_seed(seed)
    return _continue(model, list(tokens), max_new_tokens, temperature, top_p, generator, eod_id, num_token_ids)


def _continue(
    model: GPT,
    tokens: list[int],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
    eod_id: int | None,
    num_token_ids: int | None,
) -> Iterator[int]:
    cache = model.new_cache(batch_size=1, length=len(tokens) + max_new_tokens)
    device = model.embedding.weight.device
    unread = tokens
    for _ in range(max_new_tokens):
        # This must not enclose the yield, or the caller's code would run with gradients disabled.
        with torch.no_grad():
            logits_B1V = model.logits(torch.tensor([unread], device=device), cache, last_only=True)
            logits_BV = logits_B1V[:, -1, :num_token_ids].cpu()
            token = int(sample_next(logits_BV, temperature, top_p, generator))
        if token == eod_id:
            return
        yield token
        unread = [token]
