"""Statistics of sampled attention, compared with full attention matrices in float64, for MHA, GQA and MLA."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention.rotary import rotary_table
from model.diagnostics.weights import head_statistics, sampled_attention, separable_share, squared_distances
from model.gpt import GPT
from model.stability.drift import sampled_logits, sampled_positions
from tests.model.attention.reference import attention_logits, attention_weights, causal_mask
from tests.model.diagnostics import reference

SIZES = (1, 4, 16, 64)


def statistics_by_loops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: list[int],
    softcap: float | None,
    sink_H: torch.Tensor | None,
) -> dict[str, list[float]]:
    """Computes every statistic one query at a time; returns lists over heads."""
    B, H, T, _ = q.shape
    shared = H // k.shape[1]
    logits_BHTT = attention_logits(q, k)
    sink_H11 = None if sink_H is None else sink_H.view(-1, 1, 1)
    weights_BHTT = attention_weights(logits_BHTT, causal_mask(T, T), softcap, sink_H11)
    result: dict[str, list[float]] = {}
    for head in range(H):
        rows: dict[str, list[float]] = {}
        max_logit = -math.inf
        for row in range(B):
            for t in positions:
                max_logit = max(max_logit, *logits_BHTT[row, head, t, : t + 1].tolist())
                weights = weights_BHTT[row, head, t, : t + 1].tolist()
                h = -sum(a * math.log(a) for a in weights)
                rows.setdefault("entropy", []).append(h)
                rows.setdefault("largest_weight", []).append(max(weights))
                rows.setdefault("effective_tokens", []).append(math.exp(h))
                if t > 0:
                    rows.setdefault("relative_entropy", []).append(h / math.log(t + 1))
                    rows.setdefault("first_token_weight", []).append(weights[0])
                for size in SIZES:
                    if t >= size:
                        order = sorted(range(t + 1), key=lambda s: -weights[s])
                        points = [weights[s] * v[row, head // shared, s] for s in range(t + 1)]
                        share = reference.separable_share(points, order[:size])
                        rows.setdefault(f"separability_{size}", []).append(share)
        result.setdefault("max_logit", []).append(max_logit)
        for name, values in rows.items():
            result.setdefault(name, []).append(sum(values) / len(values))
    return result


@pytest.mark.parametrize("model_keys", [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "qk_norm": True}, {"kind": "mla"}])
@pytest.mark.parametrize(("softcap", "has_sink"), [(None, False), (0.7, False), (None, True), (1.5, True)])
def test_statistics_match_full_attention_matrices(
    model_keys: dict[str, Any], softcap: float | None, has_sink: bool, make_model: Callable[..., GPT]
) -> None:
    model = make_model(**model_keys).double()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 24, 32, generator=generator, dtype=torch.float64)
    rotary = rotary_table(torch.arange(24), model.rotary_dim, model.config.rope_theta)
    with torch.no_grad():
        q, k, v = model.blocks[0].attention.project(x, rotary)
    sink_H = torch.randn(4, generator=generator, dtype=torch.float64) if has_sink else None
    positions = sampled_positions(24, 6)
    attention = sampled_attention(sampled_logits(q, k, positions), v.float(), positions, softcap, sink_H)
    found = head_statistics(attention, SIZES)
    expected = statistics_by_loops(q, k, v, positions.tolist(), softcap, sink_H)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx(values, rel=2e-4, abs=1e-6), name


def test_statistics_of_a_one_hot_and_a_uniform_head() -> None:
    logits = torch.zeros(1, 2, 1, 8)
    logits[0, 0, 0, 0] = 100.0
    attention = sampled_attention(logits, torch.randn(1, 2, 8, 3), torch.tensor([7]))
    found = head_statistics(attention)
    assert found["relative_entropy"].tolist() == pytest.approx([0.0, 1.0])
    assert found["effective_tokens"].tolist() == pytest.approx([1.0, 8.0])
    assert found["first_token_weight"].tolist() == pytest.approx([1.0, 0.125])
    assert found["max_logit"].tolist() == [100.0, 0.0]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9))
def test_a_single_token_is_always_separable_and_shares_are_multiples_of_one_over_n(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(1, 2, 1, 10, generator=generator, dtype=torch.float64).softmax(dim=-1)
    values = torch.randn(1, 2, 10, 4, generator=generator, dtype=torch.float64)
    positions = torch.tensor([9])
    assert separable_share(weights, values, positions, 1).tolist() == [[[1.0], [1.0]]]
    counts = separable_share(weights, values, positions, size) * size
    assert ((counts >= 0) & (counts <= size)).all() and torch.equal(counts, counts.round())
    points = torch.randn(1, 2, 1, 4, generator=generator, dtype=torch.float64)
    direct = (weights.mT * values - points).square().sum(dim=-1).unsqueeze(2)
    torch.testing.assert_close(squared_distances(weights, values, points), direct)
