"""A learned attention sink as an additional position, for kernels without support for sinks.

The sink of head h has the logit b_h and no value, so that out = Σ softmax([s ; b_h])_i v_i. That equals the output
without a sink times σ(logsumexp(s) - b_h), so a head can attend to nothing.

Shapes: B batch, T queries, S visible positions, H query heads, G key/value heads, K query/key width, V value width,
X padded query/key width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.parameters import Kind, ParameterSpec

# CUDA kernels need widths that are multiples of 16 bytes, or 8 elements in bf16.
WIDTH_STEP = 8


def sink_spec(num_heads: int) -> ParameterSpec:
    """Returns the spec of the vector of b_h. They start at 0, where the sink weighs as much as a key with logit 0."""
    return ParameterSpec(Kind.ATTENTION_SINK, num_heads, 1, init_value=0.0)


def prepend_sink(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the sink as position 0 to the inputs of attention, for which the scale of the logits stays 1/sqrt(K).

    Queries and keys get one more dimension: b_h sqrt(K) in the queries, 1 in the sink's key and 0 in the other keys. So
    the sink's logit is b_h and no other logit changes. b_h is part of the queries because query heads that share a key
    have different sinks. The sink's value is 0. The width is padded with zeros to a multiple of 8.

    Without cached positions (T = S) a query of zeros is prepended too, which keeps the causal mask square. The caller
    discards its output by taking the last T.

    Returns:
        q (B, H, T or T + 1, X), k (B, G, S + 1, X) and v (B, G, S + 1, V).
    """
    B, H, T, K = q_BHTK.shape
    G, S = k_BGSK.shape[1:3]
    num_zeros = -(K + 1) % WIDTH_STEP
    bias_BHT1 = (sink_H * K**0.5).to(q_BHTK.dtype).view(-1, 1, 1).expand(B, H, T, 1)
    q_BHTX = F.pad(torch.cat((q_BHTK, bias_BHT1), dim=-1), (0, num_zeros, 1 if T == S else 0, 0))
    sink_key_X = torch.arange(K + 1 + num_zeros, device=k_BGSK.device).eq(K).to(k_BGSK.dtype)
    k_BGSX = torch.cat((sink_key_X.expand(B, G, 1, -1), F.pad(k_BGSK, (0, 1 + num_zeros))), dim=2)
    return q_BHTX, k_BGSX, F.pad(v_BGSV, (0, 0, 1, 0))
