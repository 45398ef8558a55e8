"""Per-head learning rates of the query/key weights: pure functions from norms to ratios.

A ratio multiplies the step of one head of one matrix, whose optimizer group already has alpha times the base rate. All
ratios are 1 at the start of a run. The rule "QuacK" is Anson & Aitchison's, arXiv 2511.21377, algorithms 1 (MHA) and
2 (MLA): a head's rate falls as the weights grow that its step is multiplied with in the logits,

    ratio(t) = factor(t) / factor(0),        factor(W) = 1 / (size of what W's step is multiplied with).

Not in the paper, and derived here from the same first-order change ΔL = [Q (ΔK)ᵀ + (ΔQ) Kᵀ] / sqrt(K):

* Grouped queries: a key head is multiplied with all its query heads, so the largest of them counts.
* No query compression: there is no W_dq, and its norm is 1.
* RMSNorm on a latent: the latent c = γ ⊙ (W x) / RMS(W x) has the size of γ whatever the size of W. So ‖γ‖ stands for
  the norm of W wherever another matrix' step is multiplied with that latent; and a step ΔW turns the latent by
  ‖ΔW‖ / ‖W‖, which is worth ‖γ‖ ‖ΔW‖ / ‖W‖, so W's own factor gains ‖W‖ / ‖γ‖.
* Query/key norms divide the logits by the sizes of both heads, so a factor is multiplied with those. For MHA and GQA
  that leaves factor(W) = ‖W‖. In MLA the norm spans both parts of a head, and the key's second part W_kr x is shared:

      size of a query head   n_q = sqrt(‖W_uq‖² + ‖W_qr‖²), times that of the query latent, which cancels
      size of a key head     n_k = sqrt(‖W_uk‖² s² / C + ‖W_kr‖²)

  where s is the size of the key/value latent (‖W_dkv‖, or ‖γ‖ with its norm) and C its width: a product W x has the
  size ‖W‖ ‖x‖ / sqrt(inputs), and x, which has passed an RMSNorm, ‖x‖ = sqrt(inputs). W_dq turns all query heads, whose
  size it sets, so factor(W_dq) = ‖W_dq‖.

Shapes: L layers, H query heads, G key heads, 1 for matrices that are not split by head. Norms are Frobenius norms.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model.parameters import Kind

Norms = Mapping[Kind, Tensor]
LATENT_GAINS = frozenset({Kind.QUERY_LATENT_GAIN, Kind.KV_LATENT_GAIN})


def quack_ratios(
    norms: Norms,
    initial: Norms,
    has_qk_norm: bool,
    max_ratio: float | None = None,
    kv_latent_dim: int | None = None,
) -> dict[Kind, Tensor]:
    """The ratio of every head of every query/key matrix.

    Args:
        norms: of the query/key matrices and latent gains now: kind -> (L, heads).
        initial: the same at the start of the run.
        has_qk_norm: whether queries and keys are normalised.
        max_ratio: a cap; the paper has none.
        kv_latent_dim: C, for latent attention with query/key norms.

    Returns:
        kind -> (L, heads) for every matrix; exactly 1 where the norms are the initial ones.
    """
    now, start = (factors(table, has_qk_norm, kv_latent_dim) for table in (norms, initial))
    ratios = {kind: now[kind] / start[kind] for kind in now}
    if max_ratio is not None:
        ratios = {kind: ratio.clamp(max=max_ratio) for kind, ratio in ratios.items()}
    return ratios


def factors(norms: Norms, has_qk_norm: bool, kv_latent_dim: int | None = None) -> dict[Kind, Tensor]:
    """The factors whose quotients are the ratios; see the module's text."""
    if Kind.QUERY in norms:
        return dict(norms) if has_qk_norm else _mha_factors(norms[Kind.QUERY], norms[Kind.KEY])
    if has_qk_norm:
        assert kv_latent_dim is not None, "latent attention has a latent width"
        return _normalised_mla_factors(norms, kv_latent_dim)
    return _mla_factors(norms)


def _mha_factors(query_LH: Tensor, key_LG: Tensor) -> dict[Kind, Tensor]:
    queries_per_key = query_LH.shape[-1] // key_LG.shape[-1]
    return {
        Kind.QUERY: 1 / key_LG.repeat_interleave(queries_per_key, dim=-1),
        Kind.KEY: 1 / query_LH.unflatten(-1, (-1, queries_per_key)).amax(dim=-1),
    }


def _mla_factors(norms: Norms) -> dict[Kind, Tensor]:
    one_L1 = torch.ones_like(norms[Kind.KV_DOWN])
    query_up_LH, query_rope_LH = norms[Kind.QUERY_UP], norms[Kind.QUERY_ROPE]
    key_up_LH, key_rope_L1 = norms[Kind.KEY_UP], norms[Kind.KEY_ROPE]
    query_down_L1, kv_down_L1 = norms.get(Kind.QUERY_DOWN, one_L1), norms[Kind.KV_DOWN]
    query_latent_L1 = norms.get(Kind.QUERY_LATENT_GAIN, query_down_L1)
    kv_latent_L1 = norms.get(Kind.KV_LATENT_GAIN, kv_down_L1)
    largest_nope_L1 = (query_up_LH * key_up_LH).amax(dim=-1, keepdim=True)
    largest_rope_L1 = query_rope_LH.amax(dim=-1, keepdim=True)
    result = {
        Kind.QUERY_UP: 1 / (query_latent_L1 * key_up_LH * kv_latent_L1),
        Kind.KEY_UP: 1 / (query_up_LH * query_latent_L1 * kv_latent_L1),
        Kind.QUERY_ROPE: (1 / (query_latent_L1 * key_rope_L1)).expand_as(query_rope_LH),
        Kind.KEY_ROPE: 1 / (largest_rope_L1 * query_latent_L1),
        Kind.KV_DOWN: (kv_down_L1 / kv_latent_L1) / (largest_nope_L1 * query_latent_L1),
    }
    if Kind.QUERY_DOWN in norms:
        smallest_L1 = torch.minimum(1 / (largest_nope_L1 * kv_latent_L1), 1 / (largest_rope_L1 * key_rope_L1))
        result[Kind.QUERY_DOWN] = (query_down_L1 / query_latent_L1) * smallest_L1
    return result


def _normalised_mla_factors(norms: Norms, kv_latent_dim: int) -> dict[Kind, Tensor]:
    key_up_LH, key_rope_L1, kv_down_L1 = norms[Kind.KEY_UP], norms[Kind.KEY_ROPE], norms[Kind.KV_DOWN]
    latent_L1 = norms.get(Kind.KV_LATENT_GAIN, kv_down_L1)
    query_LH = (norms[Kind.QUERY_UP].square() + norms[Kind.QUERY_ROPE].square()).sqrt()
    key_LH = ((key_up_LH * latent_L1).square() / kv_latent_dim + key_rope_L1.square()).sqrt()
    sizes_LH = query_LH * key_LH
    result = {
        Kind.QUERY_UP: sizes_LH / (key_up_LH * latent_L1),
        Kind.QUERY_ROPE: sizes_LH / key_rope_L1,
        Kind.KEY_UP: sizes_LH / (norms[Kind.QUERY_UP] * latent_L1),
        Kind.KEY_ROPE: 1 / (norms[Kind.QUERY_ROPE] / sizes_LH).amax(dim=-1, keepdim=True),
        Kind.KV_DOWN: (kv_down_L1 / latent_L1)
        / (norms[Kind.QUERY_UP] * key_up_LH / sizes_LH).amax(dim=-1, keepdim=True),
    }
    if Kind.QUERY_DOWN in norms:
        result[Kind.QUERY_DOWN] = norms[Kind.QUERY_DOWN]
    return result
