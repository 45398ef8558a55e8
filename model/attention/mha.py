"""Multi-head and grouped-query attention, as in Llama and Qwen3.

Shapes: B batch, T time, S visible positions (T, or the cache's length), D model width, H query heads,
G key/value heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.schema import ModelConfig
from model.attention.cache import LayerCache
from model.attention.causal import causal_attention
from model.attention.documents import Documents
from model.attention.rotary import apply_rotary
from model.attention.sink import sink_spec
from model.attention.softmax_scale import SoftmaxScale
from model.linear import Linear
from model.norm import RMSNorm
from model.parameters import Kind, ParameterSpec, residual_init_std
from model.stability.clip import LogitMaxima


class MultiHeadAttention(nn.Module):
    """Causal softmax attention with rotary positions; several query heads may share a key/value head.

    Attributes:
        softcap: Cap on the logits, or None.
        sink: The logit of every query head's sink (H), or None.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_kv_heads is not None, "the configuration must be resolved"
        assert config.head_dim is not None, "the configuration must be resolved"
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rotary_dim = head_dim
        self.logit_maxima: LogitMaxima | None = None

        std, residual_std = config.init_std, residual_init_std(config.init_std, config.num_layers)
        query_spec = ParameterSpec(Kind.QUERY, num_heads, head_dim, std)
        key_spec = ParameterSpec(Kind.KEY, num_kv_heads, head_dim, std)
        value_spec = ParameterSpec(Kind.VALUE, num_kv_heads, head_dim, std)
        output_spec = ParameterSpec(Kind.ATTENTION_OUTPUT, num_heads, head_dim, residual_std)
        # Separate matrices rather than one, since query and key weights have their own learning rate.
        self.query = Linear(config.dim, num_heads * head_dim, query_spec)
        self.key = Linear(config.dim, num_kv_heads * head_dim, key_spec)
        self.value = Linear(config.dim, num_kv_heads * head_dim, value_spec)
        self.output = Linear(num_heads * head_dim, config.dim, output_spec)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.attention.qk_norm:
            self.query_norm = RMSNorm(head_dim, config.norm_eps, Kind.QK_NORM_GAIN)
            self.key_norm = RMSNorm(head_dim, config.norm_eps, Kind.QK_NORM_GAIN)
        self.softmax_scale = SoftmaxScale(num_heads, config.max_seq_len) if config.attention.ssmax else None
        self.softcap = config.attention.softcap
        self.sink = nn.Parameter(torch.empty(num_heads)) if config.attention.sink else None
        self.gate: Linear | None = None
        if config.attention.gated:
            gate_spec = ParameterSpec(Kind.ATTENTION_GATE, num_heads, head_dim, std)
            self.gate = Linear(config.dim, num_heads * head_dim, gate_spec)

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return {} if self.sink is None else {"sink": sink_spec(self.num_heads)}

    def query_key_weights(self) -> dict[Kind, Tensor]:
        """Returns the matrices that determine the logits, for per-head policies."""
        return {Kind.QUERY: self.query.weight, Kind.KEY: self.key.weight}

    def new_cache(self, batch_size: int, num_positions: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Returns an empty cache for this layer's keys (after rotation) and values."""
        return LayerCache([(self.num_kv_heads, self.head_dim)] * 2, batch_size, num_positions, dtype, device)

    def project(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        first_position: int = 0,
        positions_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries (B, H, T, K), keys and values (B, G, T, K) after norms, rotation and Scalable-Softmax."""
        B, T, _ = x_BTD.shape
        q_BTHK = self.query(x_BTD).view(B, T, self.num_heads, self.head_dim)
        k_BTGK = self.key(x_BTD).view(B, T, self.num_kv_heads, self.head_dim)
        v_BTGK = self.value(x_BTD).view(B, T, self.num_kv_heads, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHK, k_BTGK = self.query_norm(q_BTHK), self.key_norm(k_BTGK)
        q_BTHK, k_BTGK = apply_rotary(q_BTHK, rotary), apply_rotary(k_BTGK, rotary)
        q_BHTK = q_BTHK.transpose(1, 2)
        if self.softmax_scale is not None:
            q_BHTK = self.softmax_scale(q_BHTK, first_position, positions_BT)
        return q_BHTK, k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attends to these and all earlier positions, including cached ones. Input and output are (B, T, D).

        With documents, attention stays within them, and `rotary` is the table of their positions. Documents and a
        cache cannot be combined.
        """
        first_position = 0 if cache is None else cache.length
        positions_BT = None if documents is None else documents.positions_BT
        q_BHTK, k_BGSK, v_BGSK = self.project(x_BTD, rotary, first_position, positions_BT)
        if cache is not None:
            k_BGSK, v_BGSK = cache.append(k_BGSK, v_BGSK)
            k_BGSK, v_BGSK = k_BGSK.to(q_BHTK.dtype), v_BGSK.to(q_BHTK.dtype)
        if self.logit_maxima is not None and self.training:
            self.logit_maxima.update(q_BHTK, k_BGSK, positions_BT)
        out_BHTK = causal_attention(q_BHTK, k_BGSK, v_BGSK, self.softcap, self.sink, documents)
        out_BTX = out_BHTK.transpose(1, 2).flatten(2)
        if self.gate is not None:
            out_BTX = out_BTX * self.gate(x_BTD).sigmoid()
        return self.output(out_BTX)
