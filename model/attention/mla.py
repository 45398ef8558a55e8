"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in the notation of DeepSeek-V3 (arXiv 2412.19437).

Shapes: B batch, T time, S cached positions, D model width, H heads, N unrotated and R rotated width of a query/key
head, K = N + R, V value width, C width of the key/value latent, Q width of the query latent (D without query
compression).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.schema import ModelConfig
from model.attention.cache import LayerCache
from model.attention.causal import causal_attention
from model.attention.documents import Documents
from model.attention.rotary import apply_rotary
from model.attention.sink import sink_spec
from model.attention.softmax_scale import SoftmaxScale
from model.attention.weights import attention_weights
from model.linear import Linear
from model.norm import RMSNorm
from model.parameters import Kind, ParameterSpec, residual_init_std
from model.stability.clip import LogitMaxima

# DeepSeek-V3 uses this epsilon for the latents, whatever the epsilon of its other norms.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class LatentSizes:
    """The resolved widths of `model.attention.mla`; only q_latent_dim may be None, for no query compression."""

    q_latent_dim: int | None
    kv_latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def query_key_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim


def latent_sizes(config: ModelConfig) -> LatentSizes:
    """Returns the widths of a resolved configuration."""
    mla = config.attention.mla
    assert mla.kv_latent_dim is not None, "the configuration must be resolved"
    assert mla.nope_dim is not None, "the configuration must be resolved"
    assert mla.rope_dim is not None, "the configuration must be resolved"
    assert mla.value_dim is not None, "the configuration must be resolved"
    return LatentSizes(mla.q_latent_dim, mla.kv_latent_dim, mla.nope_dim, mla.rope_dim, mla.value_dim)


class MultiHeadLatentAttention(nn.Module):
    """Causal softmax attention whose keys and values are linear functions of one small latent per token.

        c_q = W_dq x             q^h = [W_uq^h c_q ; RoPE(W_qr^h c_q)]
        c_kv = W_dkv x           k^h = [W_uk^h c_kv ; RoPE(W_kr x)]        v^h = W_uv^h c_kv

    The logits are q·k / sqrt(K). Without query compression c_q = x. With `latent_norm`, c_q and c_kv are normalised by
    an RMSNorm. With `qk_norm`, q^h and k^h are normalised over their whole width before the rotation, with a gain that
    all heads share.

    Training and prefill compute full keys and values. Decoding does not: it caches c_kv and RoPE(W_kr x), absorbs W_uk
    into the queries, and applies W_uv after the sum over positions. With `qk_norm` this remains exact (arXiv
    2606.16310): the key's gain moves to the query and to the cached RoPE(W_kr x), and the remaining factor, one inverse
    RMS per head, is cached too, since a rotation commutes with a scalar.

    Attributes:
        softcap: Cap on the logits, or None.
        sink: The logit of every head's sink (H), or None.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = latent_sizes(config)
        self.num_heads = config.num_heads
        self.sizes = sizes
        self.rotary_dim = sizes.rope_dim
        self.logit_maxima: LogitMaxima | None = None
        query_dim = sizes.q_latent_dim or config.dim
        has_latent_norm = config.attention.mla.latent_norm

        self.query_down: Linear | None = None
        self.query_latent_norm: RMSNorm | None = None
        if sizes.q_latent_dim is not None:
            self.query_down = self._matrix(config, Kind.QUERY_DOWN, config.dim, sizes.q_latent_dim)
            if has_latent_norm:
                self.query_latent_norm = RMSNorm(sizes.q_latent_dim, LATENT_NORM_EPS, Kind.QUERY_LATENT_GAIN)
        self.query_up = self._heads(config, Kind.QUERY_UP, query_dim, sizes.nope_dim)
        self.query_rope = self._heads(config, Kind.QUERY_ROPE, query_dim, sizes.rope_dim)
        self.kv_down = self._matrix(config, Kind.KV_DOWN, config.dim, sizes.kv_latent_dim)
        self.kv_latent_norm: RMSNorm | None = None
        if has_latent_norm:
            self.kv_latent_norm = RMSNorm(sizes.kv_latent_dim, LATENT_NORM_EPS, Kind.KV_LATENT_GAIN)
        self.key_up = self._heads(config, Kind.KEY_UP, sizes.kv_latent_dim, sizes.nope_dim)
        self.key_rope = self._matrix(config, Kind.KEY_ROPE, config.dim, sizes.rope_dim)
        self.value_up = self._heads(config, Kind.VALUE, sizes.kv_latent_dim, sizes.value_dim)
        residual_std = residual_init_std(config.init_std, config.num_layers)
        output_spec = ParameterSpec(Kind.ATTENTION_OUTPUT, config.num_heads, sizes.value_dim, residual_std)
        self.output = Linear(config.num_heads * sizes.value_dim, config.dim, output_spec)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.attention.qk_norm:
            self.query_norm = RMSNorm(sizes.query_key_dim, config.norm_eps, Kind.QK_NORM_GAIN)
            self.key_norm = RMSNorm(sizes.query_key_dim, config.norm_eps, Kind.QK_NORM_GAIN)
        self.softmax_scale = SoftmaxScale(config.num_heads, config.max_seq_len) if config.attention.ssmax else None
        self.softcap = config.attention.softcap
        self.sink = nn.Parameter(torch.empty(config.num_heads)) if config.attention.sink else None
        self.gate: Linear | None = None
        if config.attention.gated:
            self.gate = self._heads(config, Kind.ATTENTION_GATE, config.dim, sizes.value_dim)

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return {} if self.sink is None else {"sink": sink_spec(self.num_heads)}

    @staticmethod
    def _matrix(config: ModelConfig, kind: Kind, in_dim: int, out_dim: int) -> Linear:
        """Returns a layer that all heads share."""
        return Linear(in_dim, out_dim, ParameterSpec(kind, init_std=config.init_std))

    @staticmethod
    def _heads(config: ModelConfig, kind: Kind, in_dim: int, head_dim: int) -> Linear:
        """Returns a layer whose output is the concatenation of all heads."""
        spec = ParameterSpec(kind, config.num_heads, head_dim, config.init_std)
        return Linear(in_dim, config.num_heads * head_dim, spec)

    def query_key_weights(self) -> dict[Kind, Tensor]:
        """Returns the matrices that determine the logits, for per-head policies, and the gains of the latent norms."""
        modules = {
            Kind.QUERY_DOWN: self.query_down,
            Kind.QUERY_LATENT_GAIN: self.query_latent_norm,
            Kind.QUERY_UP: self.query_up,
            Kind.QUERY_ROPE: self.query_rope,
            Kind.KV_DOWN: self.kv_down,
            Kind.KV_LATENT_GAIN: self.kv_latent_norm,
            Kind.KEY_UP: self.key_up,
            Kind.KEY_ROPE: self.key_rope,
        }
        return {kind: module.weight for kind, module in modules.items() if module is not None}

    def new_cache(self, batch_size: int, num_positions: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Returns an empty cache: [c_kv ; rotated key part] (1, C + R), with `qk_norm` also inverse key RMS (H, 1)."""
        shapes = [(1, self.sizes.kv_latent_dim + self.sizes.rope_dim)]
        if self.key_norm is not None:
            shapes.append((self.num_heads, 1))
        return LayerCache(shapes, batch_size, num_positions, dtype, device)

    def project(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        first_position: int = 0,
        positions_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys (B, H, T, K) and values (B, H, T, V) after norms, rotation and Scalable-Softmax."""
        c_kv_BTC, k_rope_BT1R = self._compress(x_BTD)
        k_BHTK, v_BHTV = self._keys_and_values(c_kv_BTC, k_rope_BT1R, rotary)
        return self._queries(x_BTD, rotary, first_position, positions_BT), k_BHTK, v_BHTV

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attends to these and all earlier positions, including cached ones. Input and output are (B, T, D).

        With documents, attention stays within them, and `rotary` is the table of their positions. Documents and a
        cache cannot be combined. With a cache, weights are read outside the forward pass of the modules that own them,
        so they must not be sharded.
        """
        first_position = 0 if cache is None else cache.length
        positions_BT = None if documents is None else documents.positions_BT
        q_BHTK = self._queries(x_BTD, rotary, first_position, positions_BT)
        c_kv_BTC, k_rope_BT1R = self._compress(x_BTD)
        cached = [] if cache is None else cache.append(*self._cache_rows(c_kv_BTC, k_rope_BT1R, rotary))
        if first_position > 0:
            out_BHTV = self._absorbed_attention(q_BHTK, *cached)
        else:
            k_BHTK, v_BHTV = self._keys_and_values(c_kv_BTC, k_rope_BT1R, rotary)
            if self.logit_maxima is not None and self.training:
                self.logit_maxima.update(q_BHTK, k_BHTK, positions_BT)
            out_BHTV = causal_attention(q_BHTK, k_BHTK, v_BHTV, self.softcap, self.sink, documents)
        out_BTX = out_BHTV.transpose(1, 2).flatten(2)
        if self.gate is not None:
            out_BTX = out_BTX * self.gate(x_BTD).sigmoid()
        return self.output(out_BTX)

    def _queries(
        self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], first_position: int, positions_BT: Tensor | None
    ) -> Tensor:
        """Returns the queries (B, H, T, K), with norm, rotation and Scalable-Softmax applied."""
        c_q_BTQ = x_BTD if self.query_down is None else self.query_down(x_BTD)
        if self.query_latent_norm is not None:
            c_q_BTQ = self.query_latent_norm(c_q_BTQ)
        q_nope_BTHN = self.query_up(c_q_BTQ).unflatten(-1, (self.num_heads, self.sizes.nope_dim))
        q_rope_BTHR = self.query_rope(c_q_BTQ).unflatten(-1, (self.num_heads, self.sizes.rope_dim))
        q_BHTK = self._join(q_nope_BTHN, q_rope_BTHR, self.query_norm, rotary)
        if self.softmax_scale is None:
            return q_BHTK
        return self.softmax_scale(q_BHTK, first_position, positions_BT)

    def _compress(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns c_kv (B, T, C) and the keys' shared part (B, T, 1, R), before norm and rotation."""
        c_kv_BTC = self.kv_down(x_BTD)
        if self.kv_latent_norm is not None:
            c_kv_BTC = self.kv_latent_norm(c_kv_BTC)
        return c_kv_BTC, self.key_rope(x_BTD).unsqueeze(2)

    def _keys_and_values(
        self, c_kv_BTC: Tensor, k_rope_BT1R: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys (B, H, T, K), with norm and rotation applied, and the values (B, H, T, V)."""
        k_nope_BTHN = self.key_up(c_kv_BTC).unflatten(-1, (self.num_heads, self.sizes.nope_dim))
        v_BTHV = self.value_up(c_kv_BTC).unflatten(-1, (self.num_heads, self.sizes.value_dim))
        return self._join(k_nope_BTHN, k_rope_BT1R, self.key_norm, rotary), v_BTHV.transpose(1, 2)

    def _join(
        self, nope_BTHN: Tensor, rope_BTHR: Tensor, norm: RMSNorm | None, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Returns the heads [nope ; rope] (B, H, T, K), normalised over their whole width, with `rope` then rotated.

        `rope` has H heads, or one that all share.
        """
        if norm is None:
            rope_BTHR = apply_rotary(rope_BTHR, rotary)
        heads_BTHK = torch.cat((nope_BTHN, rope_BTHR.expand(-1, -1, self.num_heads, -1)), dim=-1)
        if norm is not None:
            nope_BTHN, rope_BTHR = norm(heads_BTHK).split((self.sizes.nope_dim, self.sizes.rope_dim), dim=-1)
            heads_BTHK = torch.cat((nope_BTHN, apply_rotary(rope_BTHR, rotary)), dim=-1)
        return heads_BTHK.transpose(1, 2)

    def _cache_rows(self, c_kv_BTC: Tensor, k_rope_BT1R: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Returns the cache's tensors for these positions, each (B, heads, T, width)."""
        if self.key_norm is None:
            k_rope_BT1R = apply_rotary(k_rope_BT1R, rotary)
            return [torch.cat((c_kv_BTC.unsqueeze(1), k_rope_BT1R.transpose(1, 2)), dim=-1)]
        k_nope_BTHN = self.key_up(c_kv_BTC).unflatten(-1, (self.num_heads, self.sizes.nope_dim))
        square_sum_BTH = k_nope_BTHN.float().square().sum(-1) + k_rope_BT1R.float().square().sum(-1)
        inverse_rms_BTH = (square_sum_BTH / self.sizes.query_key_dim + self.key_norm.eps).rsqrt()
        k_rope_BT1R = apply_rotary(k_rope_BT1R * self.key_norm.weight[self.sizes.nope_dim :], rotary)
        latents_B1TX = torch.cat((c_kv_BTC.unsqueeze(1), k_rope_BT1R.transpose(1, 2)), dim=-1)
        return [latents_B1TX, inverse_rms_BTH.transpose(1, 2).unsqueeze(-1)]

    def _absorbed_attention(
        self, q_BHTK: Tensor, latents_B1SX: Tensor, inverse_rms_BHS1: Tensor | None = None
    ) -> Tensor:
        """Returns attention of the last T of S cached positions (B, H, T, V), in fp32, without full keys and values.

        X is C + R. q_nope·(W_uk c_kv) = (W_ukᵀ q_nope)·c_kv, and Σ p (W_uv c_kv) = W_uv Σ p c_kv.
        """
        H, T, sizes = self.num_heads, q_BHTK.shape[2], self.sizes
        q_nope_BHTN, q_rope_BHTR = q_BHTK.split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        if self.key_norm is not None:
            q_nope_BHTN = q_nope_BHTN * self.key_norm.weight[: sizes.nope_dim]
        q_latent_BHTC = q_nope_BHTN @ self.key_up.weight.view(H, sizes.nope_dim, sizes.kv_latent_dim)
        q_BHTX = torch.cat((q_latent_BHTC, q_rope_BHTR), dim=-1).float()
        # One product for all heads, since a broadcast product would copy the cache for each head.
        latents_BSX = latents_B1SX.squeeze(1).float()
        scores_BHTS = (q_BHTX.flatten(1, 2) @ latents_BSX.mT).unflatten(1, (H, T)).float() * sizes.query_key_dim**-0.5
        if inverse_rms_BHS1 is not None:
            scores_BHTS = scores_BHTS * inverse_rms_BHS1.mT.float()
        probabilities_BHTS = attention_weights(scores_BHTS, self.softcap, self.sink)
        c_kv_BSC = latents_BSX[..., : sizes.kv_latent_dim]
        out_latent_BHTC = (probabilities_BHTS.flatten(1, 2) @ c_kv_BSC).unflatten(1, (H, T))
        value_up_HVC = self.value_up.weight.view(H, sizes.value_dim, sizes.kv_latent_dim)
        return out_latent_BHTC.to(q_BHTK.dtype) @ value_up_HVC.mT
