"""Per-head learning rates of the query/key weights: pure functions from norms to ratios.

A ratio multiplies the step of one head of one matrix, whose optimizer group already has alpha times the base learning
rate. All ratios are 1 at the start of a run. The rule "QuacK" is that of Anson & Aitchison, arXiv 2511.21377,
algorithms 1 (MHA) and 2 (MLA). In the logits a head's step is multiplied by other weights; as those grow, the head's
learning rate falls:

    ratio(t) = factor(t) / factor(0),        factor(W) = 1 / (norm of the weights that multiply W's step).

The following cases are not in the paper, and are derived here from the same first-order change of the logits,
ΔL = [Q (ΔK)ᵀ + (ΔQ) Kᵀ] / sqrt(K):

* Grouped queries: a key head is multiplied by all query heads of its group, so their largest norm counts.
* No query compression: there is no W_dq, and 1 takes the place of its norm.
* RMSNorm on a latent: the norm of the latent c = γ ⊙ (W x) / RMS(W x) depends on γ and not on W. So ‖γ‖ replaces ‖W‖
  wherever the latent multiplies another matrix's step. A step ΔW changes the latent by the fraction ‖ΔW‖ / ‖W‖, that
  is, by ‖γ‖ ‖ΔW‖ / ‖W‖, so W's own factor is multiplied by ‖W‖ / ‖γ‖.
* Query/key norms divide the logits by the norms of the query and the key, so a factor is multiplied by those. For MHA
  and GQA this leaves factor(W) = ‖W‖. In MLA, query and key consist of two parts, and all heads share the key's second
  part W_kr x:

      norm of a query   n_q = sqrt(‖W_uq‖² + ‖W_qr‖²), times the norm of the query latent, which cancels
      norm of a key     n_k = sqrt(‖W_uk‖² s² / C + ‖W_kr‖²)

  where s is the norm of the key/value latent (‖W_dkv‖, or ‖γ‖ with a latent norm) and C its width. This estimates the
  norm of W x as ‖W‖ ‖x‖ / sqrt(inputs), where ‖x‖ = sqrt(inputs) after an RMSNorm. W_dq affects all query heads and
  sets their norms, so factor(W_dq) = ‖W_dq‖.

Shapes: L layers, H query heads, G key heads, 1 for matrices that are not split by head. Norms of matrices are
Frobenius norms.
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
    """Returns the ratio of every head of every query/key matrix.

    Args:
        norms: Current norms of the query/key matrices and latent gains: kind -> (L, heads).
        initial: The same at the start of the run.
        has_qk_norm: Whether queries and keys are normalised.
        max_ratio: Upper limit of the ratios; None: no limit, as in the paper.
        kv_latent_dim: C, for latent attention with query/key norms.

    Returns:
        kind -> (L, heads) for every matrix; exactly 1 where the norms equal the initial ones.
    """
    now, start = (factors(table, has_qk_norm, kv_latent_dim) for table in (norms, initial))
    ratios = {kind: now[kind] / start[kind] for kind in now}
    if max_ratio is not None:
        ratios = {kind: ratio.clamp(max=max_ratio) for kind, ratio in ratios.items()}
    return ratios


def factors(norms: Norms, has_qk_norm: bool, kv_latent_dim: int | None = None) -> dict[Kind, Tensor]:
    """Returns the factors whose quotients are the ratios; see the module's docstring."""
    if Kind.QUERY in norms:
        return dict(norms) if has_qk_norm else _mha_factors(norms[Kind.QUERY], norms[Kind.KEY])
    if has_qk_norm:
        assert kv_latent_dim is not None, "latent attention with query/key norms needs the latent's width"
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
