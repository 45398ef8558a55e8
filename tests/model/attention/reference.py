"""Attention written out as formulas: head by head, in float64, with the full matrix of logits.

The softmax is a plain quotient of exponentials, so it needs logits below about 700.

Shapes: B batch, T queries, S positions, H query heads, G key/value heads, D model width, K query/key width, V value
width, R rotated width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.schema import ModelConfig


def causal_mask(num_queries: int, num_keys: int) -> Tensor:
    """Returns whether each query sees each key (T, S), where the queries are the last T of S positions."""
    query_positions = range(num_keys - num_queries, num_keys)
    return torch.tensor([[key <= query for key in range(num_keys)] for query in query_positions])


def document_mask(lengths: list[int]) -> Tensor:
    """Returns whether each query of a row of documents sees each key (T, T)."""
    return torch.block_diag(*(causal_mask(length, length) for length in lengths)).bool()


def attention_logits(q_BHTK: Tensor, k_BGSK: Tensor) -> Tensor:
    """Returns the logits q·k / sqrt(K) of all pairs (B, H, T, S), visible or not."""
    num_heads, num_kv_heads = q_BHTK.shape[1], k_BGSK.shape[1]
    keys = [k_BGSK[:, head // (num_heads // num_kv_heads)] for head in range(num_heads)]
    logits = [q_BHTK[:, head].double() @ key_BSK.double().mT for head, key_BSK in enumerate(keys)]
    return torch.stack(logits, dim=1) / q_BHTK.shape[-1] ** 0.5


def attention_weights(
    logits: Tensor, is_visible: Tensor, softcap: float | None = None, sink: Tensor | None = None
) -> Tensor:
    """Returns the softmax weights (..., T, S), 0 where masked.

    Args:
        logits: (..., T, S).
        is_visible: Whether each query sees each key; broadcasts against the logits.
        softcap: c of c tanh(s / c); None: no cap.
        sink: Uncapped logit of a sink, which broadcasts against (..., T, 1); None: no sink.
    """
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    exponentials = logits.exp() * is_visible
    total = exponentials.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.double().exp()
    return exponentials / total


def reference_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
    is_visible: Tensor | None = None,
) -> Tensor:
    """Returns the output of attention (B, H, T, V).

    Args:
        softcap, sink_H: See `attention_weights`.
        is_visible: Mask that broadcasts against (B, H, T, S); None: causal.
    """
    if is_visible is None:
        is_visible = causal_mask(q_BHTK.shape[2], k_BGSK.shape[2])
    sink_H11 = None if sink_H is None else sink_H.view(-1, 1, 1)
    weights_BHTS = attention_weights(attention_logits(q_BHTK, k_BGSK), is_visible, softcap, sink_H11)
    num_heads, num_kv_heads = q_BHTK.shape[1], v_BGSV.shape[1]
    values = [v_BGSV[:, head // (num_heads // num_kv_heads)] for head in range(num_heads)]
    return torch.stack([weights_BHTS[:, head] @ v_BSV.double() for head, v_BSV in enumerate(values)], dim=1)


def largest_logits(q_BHTK: Tensor, k_BGSK: Tensor, is_visible: Tensor | None = None) -> Tensor:
    """Returns the largest visible logit of every sequence and head (B, H); the mask is causal by default."""
    if is_visible is None:
        is_visible = causal_mask(q_BHTK.shape[2], k_BGSK.shape[2])
    return attention_logits(q_BHTK, k_BGSK).masked_fill(~is_visible, -torch.inf).amax(dim=(2, 3))


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Returns gain * x / sqrt(mean(x²) + eps) over the last dimension."""
    return gain.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x_BTR: Tensor, theta: float) -> Tensor:
    """Rotates the pairs (i, i + R/2) as complex numbers, by their position times theta^(-2i/R)."""
    _, T, R = x_BTR.shape
    frequencies = theta ** (-2.0 * torch.arange(R // 2, dtype=torch.float64) / R)
    angles_TR = torch.arange(T, dtype=torch.float64)[:, None] * frequencies
    first, second = x_BTR.chunk(2, dim=-1)
    rotated = torch.complex(first, second) * torch.polar(torch.ones_like(angles_TR), angles_TR)
    return torch.cat((rotated.real, rotated.imag), dim=-1)


class ReferenceLayer:
    """The parameters of an attention layer, read head by head."""

    def __init__(self, attention: nn.Module, config: ModelConfig) -> None:
        self.weights = {name: parameter.double() for name, parameter in attention.named_parameters()}
        self.config = config

    def project(self, name: str, values: Tensor, head: int | None = None, num_heads: int | None = None) -> Tensor:
        """Multiplies values by a whole matrix, or by the rows of one head."""
        matrix = self.weights[f"{name}.weight"]
        rows = matrix if head is None else matrix.chunk(num_heads or self.config.num_heads)[head]
        return values @ rows.T

    def norm(self, name: str, values: Tensor, eps: float) -> Tensor:
        """Applies a norm if the layer has it."""
        return rms_norm(values, self.weights[f"{name}.weight"], eps) if f"{name}.weight" in self.weights else values

    def attend(self, head: int, x_BTD: Tensor, q_BTK: Tensor, k_BTK: Tensor, v_BTV: Tensor) -> Tensor:
        """Returns the head's output (B, T, V) with all options, before the output matrix."""
        options, T = self.config.attention, q_BTK.shape[1]
        logits_BTT = attention_logits(q_BTK.unsqueeze(1), k_BTK.unsqueeze(1)).squeeze(1)
        if options.ssmax:
            num_visible_T1 = torch.arange(1, T + 1, dtype=torch.float64)[:, None]
            logits_BTT = logits_BTT * self.weights["softmax_scale.weight"][head] * num_visible_T1.log()
        sink = self.weights["sink"][head] if options.sink else None
        out_BTV = attention_weights(logits_BTT, causal_mask(T, T), options.softcap, sink) @ v_BTV
        if options.gated:
            out_BTV = out_BTV / (1 + (-self.project("gate", x_BTD, head)).exp())
        return out_BTV

    def output(self, heads: list[Tensor]) -> Tensor:
        """Applies the output matrix to the concatenated heads."""
        return torch.cat(heads, dim=-1) @ self.weights["output.weight"].T


def reference_mha(attention: nn.Module, x_BTD: Tensor, config: ModelConfig) -> Tensor:
    """Returns the output of a multi-head or grouped-query attention layer (B, T, D)."""
    layer, x_BTD = ReferenceLayer(attention, config), x_BTD.double()
    num_kv_heads = config.num_kv_heads
    assert num_kv_heads is not None
    heads = []
    for head in range(config.num_heads):
        kv_head = head // (config.num_heads // num_kv_heads)
        q = layer.norm("query_norm", layer.project("query", x_BTD, head), config.norm_eps)
        k = layer.norm("key_norm", layer.project("key", x_BTD, kv_head, num_kv_heads), config.norm_eps)
        v = layer.project("value", x_BTD, kv_head, num_kv_heads)
        heads.append(layer.attend(head, x_BTD, rotate(q, config.rope_theta), rotate(k, config.rope_theta), v))
    return layer.output(heads)


def reference_mla(attention: nn.Module, x_BTD: Tensor, config: ModelConfig) -> Tensor:
    """Returns the output of a multi-head latent attention layer (B, T, D)."""
    layer, x_BTD, mla = ReferenceLayer(attention, config), x_BTD.double(), config.attention.mla

    def query_or_key(name: str, nope: Tensor, rope: Tensor) -> Tensor:
        whole = layer.norm(name, torch.cat((nope, rope), dim=-1), config.norm_eps)
        return torch.cat((whole[..., : mla.nope_dim], rotate(whole[..., mla.nope_dim :], config.rope_theta)), dim=-1)

    c_q = x_BTD
    if mla.q_latent_dim is not None:
        c_q = layer.norm("query_latent_norm", layer.project("query_down", x_BTD), 1e-6)
    c_kv = layer.norm("kv_latent_norm", layer.project("kv_down", x_BTD), 1e-6)
    heads = []
    for head in range(config.num_heads):
        q_parts = (layer.project("query_up", c_q, head), layer.project("query_rope", c_q, head))
        k_parts = (layer.project("key_up", c_kv, head), layer.project("key_rope", x_BTD))
        q, k = query_or_key("query_norm", *q_parts), query_or_key("key_norm", *k_parts)
        heads.append(layer.attend(head, x_BTD, q, k, layer.project("value_up", c_kv, head)))
    return layer.output(heads)
