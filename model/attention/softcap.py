"""Causal attention with capped logits, s <- c tanh(s / c) (Gemma 2, arXiv 2408.00118), which SDPA does not support.

Shapes: B batch, T queries, S visible positions, H query heads, G key/value heads, K query/key width, V value width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from model.attention.sink import prepend_sink
from model.attention.weights import attention_weights

# Number of logits in a chunk of queries: 4 MiB in fp32, of which the backward pass holds a few copies at a time. Larger
# chunks are slower.
MAX_CHUNK_SCORES = 2**20
# The minimum width of Triton's matrix products.
MIN_FLEX_WIDTH = 16


def softcap_attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, softcap: float, sink_H: Tensor | None = None
) -> Tensor:
    """Returns attention with capped logits (B, H, T, V); see `model.attention.causal.causal_attention`.

    It uses FlexAttention on a GPU, and explicit matrix products on the CPU, with cached positions, or with heads too
    narrow for FlexAttention.
    """
    if can_use_flex(q_BHTK, k_BGSK, v_BGSV):
        return use_flex(q_BHTK, k_BGSK, v_BGSV, softcap, sink_H)
    attend_in_chunks = chunked_softcap_attention
    if torch.compiler.is_compiling():
        # The compiler would unroll the loop, which takes minutes for a long context.
        attend_in_chunks = torch.compiler.disable(attend_in_chunks)
    return attend_in_chunks(q_BHTK, k_BGSK, v_BGSV, softcap, sink_H)


def can_use_flex(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor) -> bool:
    """Returns whether FlexAttention applies: on a GPU, without cached positions, with heads that are wide enough."""
    is_wide_enough = min(k_BGSK.shape[-1], v_BGSV.shape[-1]) >= MIN_FLEX_WIDTH
    return q_BHTK.is_cuda and is_wide_enough and q_BHTK.shape[2] == k_BGSK.shape[2]


def use_flex(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    softcap: float | None,
    sink_H: Tensor | None,
    block_mask: BlockMask | None = None,
) -> Tensor:
    """Calls `flex_softcap_attention`, compiled along with the enclosing block or by itself."""
    if torch.compiler.is_compiling():
        return flex_softcap_attention(q_BHTK, k_BGSK, v_BGSV, softcap, sink_H, block_mask=block_mask)
    attend = _compiled_flex_attention()
    return flex_softcap_attention(q_BHTK, k_BGSK, v_BGSV, softcap, sink_H, attend, block_mask)


def plain_softcap_attention(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTV: Tensor, softcap: float, sink_H: Tensor | None, mask_TT: Tensor | None
) -> Tensor:
    """Returns the same without FlexAttention for T = S: causal in chunks, or, for few tokens, with the given mask."""
    if mask_TT is None:
        return chunked_softcap_attention(q_BHTK, k_BHTK, v_BHTV, softcap, sink_H)
    return _attend(q_BHTK, k_BHTK, v_BHTV, softcap, sink_H, mask_TT)


def chunked_softcap_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    softcap: float,
    sink_H: Tensor | None = None,
    chunk_queries: int | None = None,
) -> Tensor:
    """Returns the same, computed in chunks of queries, so that the whole T x S matrix is never materialised.

    The backward pass recomputes each chunk.

    Args:
        chunk_queries: Number of queries in a chunk; None: as many as fit in MAX_CHUNK_SCORES logits.
    """
    B, H, T, _ = q_BHTK.shape
    S = k_BGSK.shape[2]
    if chunk_queries is None:
        chunk_queries = max(1, MAX_CHUNK_SCORES // (B * H * S))
    outputs = []
    end = S - T
    for q_BHtK in q_BHTK.split(chunk_queries, dim=2):
        end += q_BHtK.shape[2]
        visible = (q_BHtK, k_BGSK[:, :, :end], v_BGSV[:, :, :end])
        if torch.is_grad_enabled():
            # Attention uses no random numbers, so there is no generator state to save.
            output = checkpoint(_attend, *visible, softcap, sink_H, use_reentrant=False, preserve_rng_state=False)
        else:
            output = _attend(*visible, softcap, sink_H)
        outputs.append(output)
    return torch.cat(outputs, dim=2)


def _attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    softcap: float,
    sink_H: Tensor | None,
    mask_TS: Tensor | None = None,
) -> Tensor:
    """Computes explicit products in fp32 (fp64 for fp64 inputs), even under autocast; returns the queries' dtype."""
    (B, H, T, K), G = q_BHTK.shape, k_BGSK.shape[1]
    dtype = torch.promote_types(q_BHTK.dtype, torch.float32)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        # Query heads that share a key are rows of a single product.
        q_BGXK = q_BHTK.to(dtype).reshape(B, G, -1, K) * K**-0.5
        scores_BHTS = (q_BGXK @ k_BGSK.to(dtype).mT).view(B, H, T, -1)
        weights_BHTS = attention_weights(scores_BHTS, softcap, sink_H, mask_TS)
        out_BGXV = weights_BHTS.reshape(B, G, H // G * T, -1) @ v_BGSV.to(dtype)
    return out_BGXV.view(B, H, T, -1).to(q_BHTK.dtype)


def flex_softcap_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    softcap: float | None,
    sink_H: Tensor | None = None,
    attend: Callable[..., Any] = flex_attention,
    block_mask: BlockMask | None = None,
) -> Tensor:
    """Returns the same with FlexAttention, without cached positions (T = S).

    Args:
        softcap: Cap on the logits; None: no cap.
        attend: `flex_attention`, compiled or not.
        block_mask: The mask, including the sink; None: causal.
    """
    T, scale, has_sink = q_BHTK.shape[2], q_BHTK.shape[3] ** -0.5, sink_H is not None
    if sink_H is not None:
        q_BHTK, k_BGSK, v_BGSV = prepend_sink(q_BHTK, k_BGSK, v_BGSV, sink_H)

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert softcap is not None
        capped = softcap * torch.tanh(score / softcap)
        return torch.where(key == 0, score, capped) if has_sink else capped

    if block_mask is None:
        # Compiled blocks build the mask on every call, because the compiler cannot trace lru_cache.
        make_mask = _block_mask if torch.compiler.is_compiling() else _cached_block_mask
        block_mask = make_mask(k_BGSK.shape[2], q_BHTK.device)
    out_BHTV = attend(
        q_BHTK,
        k_BGSK,
        v_BGSV,
        score_mod=None if softcap is None else cap,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q_BHTK.shape[1] > k_BGSK.shape[1],
    )
    return out_BHTV[:, :, -T:]


def _block_mask(num_positions: int, device: torch.device) -> BlockMask:
    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(is_visible, None, None, num_positions, num_positions, device=device)


@functools.lru_cache(maxsize=8)
def _cached_block_mask(num_positions: int, device: torch.device) -> BlockMask:
    return _block_mask(num_positions, device)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)
