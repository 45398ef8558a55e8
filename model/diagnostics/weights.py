"""Attention weights of sampled queries, and per-head statistics of them.

Entropy, the largest weight and the first token's weight follow Mudarisov et al., arXiv 2508.17821, and Zhai et al.,
arXiv 2303.06296. Both rising and falling entropy are informative.

Shapes: B sequences, H query heads, G key heads, Q sampled queries, T positions, K query/key width, V value width. A
query at position t sees L = t + 1 positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.stability.drift import visible


@dataclass(frozen=True)
class SampledAttention:
    """One layer's attention from sampled queries.

    Attributes:
        positions_Q: Positions of the queries.
        logits_BHQT: q·k / sqrt(K), before a softcap; 0 where masked.
        weights_BHQT: Softmax weights; 0 where masked. With a sink they sum to less than 1.
        values_BHTV: Values, repeated for every query head.
    """

    positions_Q: Tensor
    logits_BHQT: Tensor
    weights_BHQT: Tensor
    values_BHTV: Tensor


def sampled_attention(
    logits_BHQT: Tensor,
    v_BGTV: Tensor,
    positions_Q: Tensor,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
) -> SampledAttention:
    """Computes the weights from the logits of `model.stability.drift.sampled_logits`.

    Args:
        softcap: c of c tanh(s / c); None: no cap.
        sink_H: The logit of every head's sink; None: no sink.
    """
    scores = logits_BHQT if softcap is None else softcap * (logits_BHQT / softcap).tanh()
    scores = scores.masked_fill(~visible(positions_Q, scores.shape[-1]), -torch.inf)
    normaliser_BHQ1 = scores.logsumexp(dim=-1, keepdim=True)
    if sink_H is not None:
        normaliser_BHQ1 = torch.logaddexp(normaliser_BHQ1, sink_H.to(scores.dtype).view(-1, 1, 1))
    values_BHTV = v_BGTV.to(scores.dtype).repeat_interleave(scores.shape[1] // v_BGTV.shape[1], dim=1)
    return SampledAttention(positions_Q, logits_BHQT, (scores - normaliser_BHQ1).exp(), values_BHTV)


def entropy(weights: Tensor) -> Tensor:
    """Returns -Σ α log α over the last dimension, in nats; zero weights contribute 0."""
    return torch.special.entr(weights).sum(dim=-1)


def head_statistics(attention: SampledAttention, set_sizes: Sequence[int] = ()) -> dict[str, Tensor]:
    """Returns statistics of every head (H), over sequences and queries.

    max_logit           largest visible logit
    entropy             mean entropy in nats
    relative_entropy    mean entropy / log L, from 0 (one token) to 1 (uniform); excludes the query at position 0
    largest_weight      mean of the largest weight
    effective_tokens    mean of e^entropy
    first_token_weight  mean weight of position 0; excludes the query at position 0
    separability_N      mean share of separable tokens among the N largest weights (`separable_share`), for every N in
                        `set_sizes` that is smaller than L for some query
    """
    positions_Q, weights_BHQT = attention.positions_Q, attention.weights_BHQT
    is_visible_QT = visible(positions_Q, weights_BHQT.shape[-1])
    entropy_BHQ = entropy(weights_BHQT)
    statistics = {
        "max_logit": attention.logits_BHQT.masked_fill(~is_visible_QT, -torch.inf).amax(dim=(0, 2, 3)),
        "entropy": entropy_BHQ.mean(dim=(0, 2)),
        "largest_weight": weights_BHQT.amax(dim=-1).mean(dim=(0, 2)),
        "effective_tokens": entropy_BHQ.exp().mean(dim=(0, 2)),
    }
    sees_more = positions_Q > 0
    if sees_more.any():
        log_visible_Q = (positions_Q[sees_more] + 1).to(entropy_BHQ.dtype).log()
        statistics["relative_entropy"] = (entropy_BHQ[:, :, sees_more] / log_visible_Q).mean(dim=(0, 2))
        statistics["first_token_weight"] = weights_BHQT[:, :, sees_more, 0].mean(dim=(0, 2))
    for size in set_sizes:
        sees_enough = positions_Q >= size
        if sees_enough.any():
            share_BHQ = separable_share(
                weights_BHQT[:, :, sees_enough], attention.values_BHTV, positions_Q[sees_enough], size
            )
            statistics[f"separability_{size}"] = share_BHQ.mean(dim=(0, 2))
    return statistics


def separable_share(weights_BHQT: Tensor, values_BHTV: Tensor, positions_Q: Tensor, size: int) -> Tensor:
    """Returns N_s / N of the N largest weights of every query (B, H, Q), where N is `size` and below every query's L.

    With I the tokens of the N largest weights and s = Σ_I α_i x_i, a token in I is separable if α_i x_i is closer to s
    than that of any token outside I (arXiv 2508.17821). The share is 1 for N = 1.
    """
    top_BHQN = weights_BHQT.topk(size, dim=-1).indices
    is_top_BHQT = torch.zeros_like(weights_BHQT, dtype=torch.bool).scatter_(-1, top_BHQN, True)
    chosen_BHQT = weights_BHQT * is_top_BHQT
    sum_BHQV = chosen_BHQT @ values_BHTV
    squares_BHQT = squared_distances(weights_BHQT, values_BHTV, sum_BHQV)
    is_outside_BHQT = visible(positions_Q, weights_BHQT.shape[-1]) & ~is_top_BHQT
    radius_BHQ1 = squares_BHQT.masked_fill(~is_outside_BHQT, torch.inf).amin(dim=-1, keepdim=True)
    return ((squares_BHQT < radius_BHQ1) & is_top_BHQT).sum(dim=-1).to(weights_BHQT.dtype) / size


def squared_distances(weights_BHQT: Tensor, values_BHTV: Tensor, points_BHQV: Tensor) -> Tensor:
    """Returns ‖α_i x_i - s‖² of every token (B, H, Q, T), without materialising the vectors α_i x_i."""
    norms_BH1T = values_BHTV.square().sum(dim=-1).unsqueeze(2)
    products_BHQT = points_BHQV @ values_BHTV.mT
    squares = weights_BHQT.square() * norms_BH1T - 2 * weights_BHQT * products_BHQT
    return (squares + points_BHQV.square().sum(dim=-1, keepdim=True)).clamp_min(0)


def mean_change(new_BHQT: Tensor, old_BHQT: Tensor, positions_Q: Tensor) -> Tensor:
    """Returns each head's mean absolute difference (H) of two `sampled_logits` over their visible elements."""
    B, _, _, T = new_BHQT.shape
    return (new_BHQT - old_BHQT).abs().sum(dim=(0, 2, 3)) / (B * visible(positions_Q, T).sum())
