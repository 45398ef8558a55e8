"""Sampling of text from a model, token by token.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.gpt import GPT


def check_sampling(temperature: float, top_p: float) -> None:
    """Raises ValueError unless temperature is finite and not negative and top_p in (0, 1]."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; expected 0 or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; expected a number above 0 and at most 1")


def sample_next(
    logits_BV: Tensor, temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draws one token id per row (B).

    Args:
        logits_BV: scores of the next token.
        temperature: divides the scores; 0 takes the most likely token.
        top_p: draw only from the smallest set of most likely tokens whose probabilities sum to at least top_p
            (nucleus sampling, Holtzman et al., arXiv 1904.09751).
        generator: source of randomness, on the device of the scores.

    Raises:
        ValueError: temperature or top_p is out of range.
    """
    check_sampling(temperature, top_p)
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    # The largest at 0, and in fp64: whatever the temperature, nothing overflows but to minus infinity.
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
    """Continues one prompt; yields every new token id as soon as it is drawn.

    Sampling happens on the CPU, so that a seed means the same on every device.

    Args:
        model: the model; it stays as it is.
        tokens: the prompt's ids, at least one.
        max_new_tokens: largest number of new tokens.
        temperature, top_p: see `sample_next`.
        seed: of the random draws.
        eod_id: end-of-document id: generation ends when it is drawn, without yielding it; None: never.
        num_token_ids: ids that the tokenizer has; the padding of the vocabulary beyond them is never drawn.

    Raises:
        ValueError: temperature or top_p is out of range, the prompt is empty, or prompt and max_new_tokens
            together are longer than max_seq_len.
    """
    check_sampling(temperature, top_p)
    if not tokens:
        raise ValueError("the prompt is empty; expected at least one token")
    max_seq_len = model.config.max_seq_len
    if len(tokens) + max_new_tokens > max_seq_len:
        raise ValueError(
            f"{len(tokens)} tokens of the prompt and {max_new_tokens} new ones are more than"
            f" model.max_seq_len {max_seq_len}"
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
        # Not around the yield: the caller's code must not run without gradients.
        with torch.no_grad():
            logits_B1V = model.logits(torch.tensor([unread], device=device), cache, last_only=True)
            logits_BV = logits_B1V[:, -1, :num_token_ids].cpu()
            token = int(sample_next(logits_BV, temperature, top_p, generator))
        if token == eod_id:
            return
        yield token
        unread = [token]
