"""Attention by its formulas: head by head in float64, with the whole matrix of logits.

Shapes: B batch, T time, D model width, K query/key width, V value width, R rotated width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.schema import ModelConfig


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x_BTR: Tensor, theta: float) -> Tensor:
    """Pairs (i, i + R/2) as complex numbers, turned by their position."""
    _, T, R = x_BTR.shape
    frequencies = theta ** (-2.0 * torch.arange(R // 2, dtype=torch.float64) / R)
    angles_TR = torch.arange(T, dtype=torch.float64)[:, None] * frequencies
    first, second = x_BTR.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles_TR), angles_TR)
    return torch.cat((turned.real, turned.imag), dim=-1)


class Reference:
    """The parameters of an attention layer, read head by head."""

    def __init__(self, attention: nn.Module, config: ModelConfig) -> None:
        self.weights = {name: parameter.double() for name, parameter in attention.named_parameters()}
        self.config = config

    def project(self, name: str, values: Tensor, head: int | None = None, num_heads: int | None = None) -> Tensor:
        matrix = self.weights[f"{name}.weight"]
        rows = matrix if head is None else matrix.chunk(num_heads or self.config.num_heads)[head]
        return values @ rows.T

    def norm(self, name: str, values: Tensor, eps: float) -> Tensor:
        return rms_norm(values, self.weights[f"{name}.weight"], eps) if f"{name}.weight" in self.weights else values

    def attend(self, head: int, x_BTD: Tensor, q_BTK: Tensor, k_BTK: Tensor, v_BTV: Tensor) -> Tensor:
        """The head's output (B, T, V) with all options, before the output matrix."""
        options = self.config.attention
        T, K = q_BTK.shape[1:]
        num_visible_T1 = torch.arange(1, T + 1, dtype=torch.float64)[:, None]
        scores_BTT = q_BTK @ k_BTK.mT / K**0.5
        if options.ssmax:
            scores_BTT = scores_BTT * self.weights["softmax_scale.weight"][head] * num_visible_T1.log()
        if options.softcap is not None:
            scores_BTT = options.softcap * (scores_BTT / options.softcap).tanh()
        exponentials_BTT = scores_BTT.exp() * (torch.arange(T) < num_visible_T1)
        sums_BT1 = exponentials_BTT.sum(-1, keepdim=True)
        if options.sink:
            sums_BT1 = sums_BT1 + self.weights["sink"][head].exp()
        out_BTV = exponentials_BTT / sums_BT1 @ v_BTV
        if options.gated:
            out_BTV = out_BTV / (1 + (-self.project("gate", x_BTD, head)).exp())
        return out_BTV

    def output(self, heads: list[Tensor]) -> Tensor:
        return torch.cat(heads, dim=-1) @ self.weights["output.weight"].T


def reference_mha(attention: nn.Module, x_BTD: Tensor, config: ModelConfig) -> Tensor:
    """Multi-head and grouped-query attention (B, T, D)."""
    reference, x_BTD = Reference(attention, config), x_BTD.double()
    num_kv_heads = config.num_kv_heads
    assert num_kv_heads is not None
    heads = []
    for head in range(config.num_heads):
        kv_head = head // (config.num_heads // num_kv_heads)
        q = reference.norm("query_norm", reference.project("query", x_BTD, head), config.norm_eps)
        k = reference.norm("key_norm", reference.project("key", x_BTD, kv_head, num_kv_heads), config.norm_eps)
        v = reference.project("value", x_BTD, kv_head, num_kv_heads)
        heads.append(reference.attend(head, x_BTD, rotate(q, config.rope_theta), rotate(k, config.rope_theta), v))
    return reference.output(heads)


def reference_mla(attention: nn.Module, x_BTD: Tensor, config: ModelConfig) -> Tensor:
    """Multi-head latent attention (B, T, D)."""
    reference, x_BTD, mla = Reference(attention, config), x_BTD.double(), config.attention.mla

    def query_or_key(name: str, nope: Tensor, rope: Tensor) -> Tensor:
        whole = reference.norm(name, torch.cat((nope, rope), dim=-1), config.norm_eps)
        return torch.cat((whole[..., : mla.nope_dim], rotate(whole[..., mla.nope_dim :], config.rope_theta)), dim=-1)

    c_q = x_BTD
    if mla.q_latent_dim is not None:
        c_q = reference.norm("query_latent_norm", reference.project("query_down", x_BTD), 1e-6)
    c_kv = reference.norm("kv_latent_norm", reference.project("kv_down", x_BTD), 1e-6)
    heads = []
    for head in range(config.num_heads):
        q_parts = (reference.project("query_up", c_q, head), reference.project("query_rope", c_q, head))
        k_parts = (reference.project("key_up", c_kv, head), reference.project("key_rope", x_BTD))
        q, k = query_or_key("query_norm", *q_parts), query_or_key("key_norm", *k_parts)
        heads.append(reference.attend(head, x_BTD, q, k, reference.project("value_up", c_kv, head)))
    return reference.output(heads)
