"""QK-Clip (Kimi K2 report, arXiv 2507.20534): scales query/key weights down after a step with too large a logit.

    S_h = max over the step's batch of q·k / sqrt(K)        γ_h = min(1, threshold / S_h)

    MHA   W_q^h and W_k^h times sqrt(γ_h)
    GQA   a key head and its query heads times sqrt(γ) of the group's largest S (not in the report)
    MLA   W_uq^h and W_uk^h times sqrt(γ_h), W_qr^h times γ_h; W_kr, which all heads share, is unchanged

The exact S_h needs the product of all queries with all keys. By the Cauchy-Schwarz inequality it is at most
max‖q‖ max‖k‖ / sqrt(K), which costs almost nothing, so only heads whose bound exceeds the threshold are computed.

Shapes: B batch, T time, H query heads, G key heads, K query/key width, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from model.parameters import Kind

CHUNK_ELEMENTS = 1 << 24  # the number of logits computed at once


class LogitMaxima:
    """Tracks the largest logit of every query head of a layer since the last `reset`.

    The layer calls `update` during training.

    Attributes:
        max_H: The largest logits, fp32; -inf for heads whose bound did not exceed the threshold.
        row_mask_B: The rows of the batch that count; None: all. Set it before the layer runs.
    """

    def __init__(self, num_heads: int, threshold: float, device: torch.device) -> None:
        self._threshold = threshold
        self.max_H = torch.full((num_heads,), -torch.inf, device=device)
        self.row_mask_B: Tensor | None = None

    def reset(self) -> None:
        """Resets all maxima to -inf."""
        self.max_H.fill_(-torch.inf)

    @torch.no_grad()
    def update(self, q_BHTK: Tensor, k_BGTK: Tensor, positions_BT: Tensor | None = None) -> None:
        """Updates the maxima with one forward pass; `positions_BT` is the same as in `causal_logit_maxima`."""
        with torch.autocast(q_BHTK.device.type, enabled=False):
            maxima_BH = causal_logit_maxima(
                q_BHTK.detach(), k_BGTK.detach(), self._threshold, self.row_mask_B, positions_BT
            )
        torch.maximum(self.max_H, maxima_BH.amax(dim=0), out=self.max_H)


def causal_logit_maxima(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    threshold: float,
    row_mask_B: Tensor | None = None,
    positions_BT: Tensor | None = None,
) -> Tensor:
    """Returns the largest visible logit of every sequence and head (B, H), fp32; -inf if its bound is too low.

    Args:
        threshold: Logits are computed only for heads whose bound exceeds this.
        row_mask_B: The sequences that count; None: all.
        positions_BT: Each token's position in its document, outside which nothing is visible to it; None: each row is
            one document.
    """
    T, num_queries_per_key = q_BHTK.shape[2], q_BHTK.shape[1] // k_BGTK.shape[1]
    scale = q_BHTK.shape[-1] ** -0.5
    bound_BH = _largest_norm(q_BHTK) * _largest_norm(k_BGTK).repeat_interleave(num_queries_per_key, dim=1) * scale
    passes_BH = bound_BH > threshold
    if row_mask_B is not None:
        passes_BH &= row_mask_B[:, None]
    result_BH = torch.full_like(bound_BH, -torch.inf)
    rows, heads = passes_BH.nonzero(as_tuple=True)
    num_at_once = max(1, CHUNK_ELEMENTS // T**2)
    for start in range(0, len(rows), num_at_once):
        row_N, head_N = rows[start : start + num_at_once], heads[start : start + num_at_once]
        q_NTK, k_NTK = q_BHTK[row_N, head_N].float(), k_BGTK[row_N, head_N // num_queries_per_key].float()
        maxima_N = _causal_maxima(q_NTK, k_NTK, None if positions_BT is None else positions_BT[row_N])
        result_BH[row_N, head_N] = maxima_N * scale
    return result_BH


def _largest_norm(heads_BHTK: Tensor) -> Tensor:
    return torch.linalg.vector_norm(heads_BHTK, dim=-1, dtype=torch.float32).amax(dim=-1)


def _causal_maxima(q_NTK: Tensor, k_NTK: Tensor, positions_NT: Tensor | None = None) -> Tensor:
    """Returns the largest q_t·k_s with s ≤ t in the same document, for N heads (N), one chunk of queries at a time."""
    N, T, _ = q_NTK.shape
    chunk = max(1, CHUNK_ELEMENTS // (N * T))
    maxima = []
    for start in range(0, T, chunk):
        stop = min(start + chunk, T)
        products_NQT = q_NTK[:, start:stop] @ k_NTK[:, :stop].mT
        hidden_QT = torch.ones_like(products_NQT[0], dtype=torch.bool).triu(start + 1)
        products_NQT.masked_fill_(hidden_QT, -torch.inf)
        if positions_NT is not None:
            tokens_T = torch.arange(stop, device=q_NTK.device)
            first_NQ = tokens_T[start:] - positions_NT[:, start:stop]
            products_NQT.masked_fill_(tokens_T < first_NQ.unsqueeze(2), -torch.inf)
        maxima.append(products_NQT.amax(dim=(1, 2)))
    return torch.stack(maxima).amax(dim=0)


@runtime_checkable
class WatchesLogits(Protocol):
    """An attention layer that passes its queries and keys to `logit_maxima` if that is set."""

    num_heads: int
    logit_maxima: LogitMaxima | None


def attach_logit_maxima(model: nn.Module, threshold: float, device: torch.device) -> list[LogitMaxima]:
    """Attaches a `LogitMaxima` to every attention layer of a model, and returns them in the order of the layers."""
    result = []
    for module in model.modules():
        if isinstance(module, WatchesLogits):
            maxima = LogitMaxima(module.num_heads, threshold, device)
            module.logit_maxima = maxima
            result.append(maxima)
    return result


def clip_factors(max_LH: Tensor, threshold: float, num_key_heads: int | None) -> dict[Kind, Tensor]:
    """Returns the factors to multiply each head's weights by.

    Args:
        max_LH: The largest logits.
        threshold: The largest allowed logit, positive.
        num_key_heads: G for multi-head or grouped-query attention; None: latent attention.

    Returns:
        kind -> (L, heads), exactly 1 for heads that do not exceed the threshold.
    """
    gamma_LH = torch.where(max_LH > threshold, threshold / max_LH, 1.0)
    if num_key_heads is None:
        return {Kind.QUERY_UP: gamma_LH.sqrt(), Kind.KEY_UP: gamma_LH.sqrt(), Kind.QUERY_ROPE: gamma_LH}
    num_queries_per_key = max_LH.shape[1] // num_key_heads
    key_LG = gamma_LH.unflatten(1, (num_key_heads, num_queries_per_key)).amin(dim=-1).sqrt()
    return {Kind.QUERY: key_LG.repeat_interleave(num_queries_per_key, dim=1), Kind.KEY: key_LG}


def logit_factor(factors: Mapping[Kind, Tensor]) -> Tensor:
    """Returns the factor by which `clip_factors` scale the logits of each query head (L, H)."""
    if Kind.QUERY_ROPE in factors:
        return factors[Kind.QUERY_ROPE]
    return factors[Kind.QUERY].square()
