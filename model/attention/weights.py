"""Explicit attention weights, for code that does not use a fused kernel.

Shapes: B batch, T queries, S visible positions, H query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Returns whether each query sees each key (T, S), where the queries are the last T of S positions."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def attention_weights(
    scores_BHTS: Tensor,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
    mask_TS: Tensor | None = None,
) -> Tensor:
    """Returns the softmax over visible positions (B, H, T, S), where the queries are the last T of S positions.

    Args:
        scores_BHTS: The logits q·k / sqrt(K).
        softcap: c of c tanh(s / c) (Gemma 2, arXiv 2408.00118), applied before the mask; None: no cap.
        sink_H: The uncapped logit of a sink that takes weight but has no value, so that the weights sum to less than 1;
            None: no sink.
        mask_TS: Whether each query sees each key; None: causal.
    """
    T, S = scores_BHTS.shape[2:]
    if softcap is not None:
        scores_BHTS = softcap * (scores_BHTS / softcap).tanh()
    if mask_TS is None:
        mask_TS = causal_mask(T, S, scores_BHTS.device)
    scores_BHTS = scores_BHTS.masked_fill(~mask_TS, -torch.inf)
    if sink_H is None:
        return scores_BHTS.softmax(dim=-1)
    sink_BHT1 = sink_H.to(scores_BHTS.dtype).view(-1, 1, 1).expand_as(scores_BHTS[..., :1])
    return torch.cat((scores_BHTS, sink_BHT1), dim=-1).softmax(dim=-1)[..., :S]
