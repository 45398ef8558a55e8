"""Causal softmax attention with fused kernels.

Shapes: B batch, T queries, S visible positions, H query heads, G key/value heads, K query/key width, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.documents import Documents, attend_by_document
from model.attention.sink import prepend_sink
from model.attention.softcap import can_use_flex, plain_softcap_attention, softcap_attention, use_flex
from model.attention.weights import causal_mask


def causal_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Returns softmax(q kᵀ / sqrt(K)) v (B, H, T, V), where the queries are the last T of S positions.

    Args:
        q_BHTK, k_BGSK, v_BGSV: Queries, keys and values; H is a multiple of G.
        softcap: c of the cap s <- c tanh(s / c) on the logits; None: no cap.
        sink_H: The logit of every query head's sink (`model.attention.sink`); None: no sink.
        documents: Attention stays within these; requires T = S, so no cached positions. None: each row is one document.
    """
    if documents is not None:
        return _document_attention(q_BHTK, k_BGSK, v_BGSV, softcap, sink_H, documents)
    if softcap is not None:
        return softcap_attention(q_BHTK, k_BGSK, v_BGSV, softcap, sink_H)
    return _uncapped_attention(q_BHTK, k_BGSK, v_BGSV, sink_H)


def _document_attention(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    softcap: float | None,
    sink_H: Tensor | None,
    documents: Documents,
) -> Tensor:
    """Implements `causal_attention` within documents."""
    if documents.block_mask is not None and can_use_flex(q_BHTK, k_BGTK, v_BGTV):
        return use_flex(q_BHTK, k_BGTK, v_BGTV, softcap, sink_H, documents.block_mask)

    def attend(q_1HTK: Tensor, k_1GTK: Tensor, v_1GTV: Tensor, mask_TT: Tensor | None) -> Tensor:
        if mask_TT is not None:
            mask_TT = mask_TT.to(q_1HTK.device)
        if softcap is not None:
            return plain_softcap_attention(q_1HTK, k_1GTK, v_1GTV, softcap, sink_H, mask_TT)
        return _uncapped_attention(q_1HTK, k_1GTK, v_1GTV, sink_H, mask_TT)

    by_document = attend_by_document
    if torch.compiler.is_compiling():
        by_document = torch.compiler.disable(by_document)  # documents differ in every batch
    return by_document(q_BHTK, k_BGTK, v_BGTV, documents.positions_BT, attend)


def _uncapped_attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, sink_H: Tensor | None, mask_TT: Tensor | None = None
) -> Tensor:
    """Returns attention with a causal mask, or with the given mask if T = S."""
    scale = q_BHTK.shape[3] ** -0.5
    if sink_H is None:
        return _fused_attention(q_BHTK, k_BGSK, v_BGSV, scale, mask_TT)
    T = q_BHTK.shape[2]
    if mask_TT is not None:
        mask_TT = F.pad(F.pad(mask_TT, (0, 0, 1, 0)), (1, 0), value=True)
    return _fused_attention(*prepend_sink(q_BHTK, k_BGSK, v_BGSV, sink_H), scale, mask_TT)[:, :, -T:]


def _fused_attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, scale: float, mask_TS: Tensor | None = None
) -> Tensor:
    """Returns softmax(scale q kᵀ) v, causal by default, from a kernel that never materialises the T x S matrix."""
    T, S, K, V = q_BHTK.shape[2], k_BGSK.shape[2], q_BHTK.shape[3], v_BGSV.shape[3]
    num_queries_per_key = q_BHTK.shape[1] // k_BGSK.shape[1]
    is_grouped = num_queries_per_key > 1
    if is_grouped and q_BHTK.is_cuda and q_BHTK.dtype == torch.float32:
        # No fused fp32 CUDA kernel supports grouped queries: SDPA would materialise the T x S matrix.
        k_BGSK = k_BGSK.repeat_interleave(num_queries_per_key, dim=1)
        v_BGSV = v_BGSV.repeat_interleave(num_queries_per_key, dim=1)
        is_grouped = False
    if K != V:
        # Flash kernels require K = V; otherwise SDPA would materialise the T x S matrix. Padding with zeros changes
        # neither scores nor sums.
        q_BHTK, k_BGSK = _pad_width(q_BHTK, V), _pad_width(k_BGSK, V)
        v_BGSV = _pad_width(v_BGSV, K)
    # SDPA's own causal mask is correct only without cached positions, and a single query needs no mask.
    is_causal = T == S and mask_TS is None
    if 1 < T < S:
        mask_TS = causal_mask(T, S, q_BHTK.device)
    out_BHTV = F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSV, attn_mask=mask_TS, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )
    return out_BHTV[..., :V]


def _pad_width(x: Tensor, width: int) -> Tensor:
    """Pads the last dimension with zeros to at least `width`."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x
