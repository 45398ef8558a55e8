"""The tables of the offline analysis, compared with full attention matrices in float64, for MHA, GQA and MLA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention.rotary import rotary_table
from model.diagnostics import analysis
from model.diagnostics.sensitivity import random_direction
from model.diagnostics.weights import SampledAttention, sampled_attention
from model.gpt import GPT
from model.stability.drift import sampled_logits
from tests.model.attention.reference import attention_logits, attention_weights, causal_mask
from tests.model.diagnostics.reference import separable_share, set_distance

T = 24
POSITIONS = [5, 11, 23]
SIZES = [1, 4, 10]


class Query:
    """One query, with the logits, weights and values of its visible tokens."""

    def __init__(self, logits: torch.Tensor, weights: torch.Tensor, values: torch.Tensor) -> None:
        self.logits = logits
        self.weights = weights
        self.values = values
        self.order = self.weights.argsort(descending=True).tolist()

    def points(self, unit_values: bool = False) -> list[torch.Tensor]:
        values = [value / value.norm() for value in self.values] if unit_values else self.values
        return [weight * value for weight, value in zip(self.weights, values, strict=True)]

    def weight_row(self) -> dict[str, float]:
        length = len(self.weights)
        entropy = -sum(float(a) * math.log(float(a)) for a in self.weights)
        return {
            "entropy": entropy,
            "relative_entropy": entropy / math.log(length),
            "effective_tokens": math.exp(entropy),
            "max_logit": float(self.logits.max()),
            "first_token_weight": float(self.weights[0]),
            "scaled_min": length * float(self.weights.min()),
            "scaled_max": length * float(self.weights.max()),
        }

    def top_distance(self, size: int) -> float:
        return set_distance(self.points(), self.order[:size])

    def bound(self, size: int) -> float:
        inside, outside = self.order[:size], self.order[size:]
        mass = float(self.weights[inside].sum())
        farthest = max(float((self.values[i] - self.values[j]).norm()) for i in outside for j in inside)
        largest = max(float(self.values[j].norm()) for j in inside)
        return (1 - mass) * farthest + largest * (mass * len(outside) - (1 - mass))

    def share(self, size: int) -> float:
        return separable_share(self.points(unit_values=True), self.order[:size])


def expected_rows(queries: dict[tuple[int, int], list[Query]]) -> Iterator[tuple[int, int, int, list[Query]]]:
    """Yields (head, L, N, queries of all sequences) for every N below L."""
    for (head, length), found in queries.items():
        for size in SIZES:
            if size < length:
                yield head, length, size, found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("keys", [{}, {"num_kv_heads": 2, "qk_norm": True}, {"kind": "mla"}])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_tables_match_full_attention_matrices(
    keys: dict[str, Any], softcap: float | None, make_model: Callable[..., GPT]
) -> None:
    model = make_model(**keys).double()
    x = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rotary = rotary_table(torch.arange(T), model.rotary_dim, model.config.rope_theta)
    with torch.no_grad():
        q, k, v = model.blocks[0].attention.project(x, rotary)
    positions = torch.tensor(POSITIONS)
    attention = sampled_attention(sampled_logits(q, k, positions), v, positions, softcap)

    logits = attention_logits(q, k)
    weights = attention_weights(logits, causal_mask(T, T), softcap)
    values = v.repeat_interleave(4 // v.shape[1], dim=1)
    queries = {
        (head, t + 1): [
            Query(logits[row, head, t, : t + 1], weights[row, head, t, : t + 1], values[row, head, : t + 1])
            for row in range(2)
        ]
        for head in range(4)
        for t in POSITIONS
    }
    found = {(row["head"], row["L"]): row for row in analysis.weight_rows(attention)}
    assert found.keys() == queries.keys()
    for key, both in queries.items():
        for name in both[0].weight_row():
            expected = mean([query.weight_row()[name] for query in both])
            assert found[key][name] == pytest.approx(expected, rel=1e-6), (key, name)

    generator = torch.Generator().manual_seed(0)
    distances = {(r["head"], r["L"], r["N"]): r for r in analysis.distance_rows(attention, SIZES, 4, generator)}
    critical = {(r["head"], r["L"], r["N"]): r for r in analysis.critical_distances(attention, SIZES, 4, generator)}
    shares = {(r["head"], r["L"], r["N"]): r for r in analysis.separability_rows(attention, SIZES)}
    expected_keys = {(head, length, size) for head, length, size, _ in expected_rows(queries)}
    assert distances.keys() == critical.keys() == shares.keys() == expected_keys
    for head, length, size, both in expected_rows(queries):
        key = (head, length, size)
        top = mean([query.top_distance(size) for query in both])
        assert distances[key]["top"] == pytest.approx(top, rel=1e-6), key
        assert critical[key]["top"] == pytest.approx(top, rel=1e-6), key
        assert distances[key]["bound"] == pytest.approx(mean([query.bound(size) for query in both]), rel=1e-6), key
        assert shares[key]["share"] == pytest.approx(mean([query.share(size) for query in both])), key

    temperatures, epsilons = [0.1, 1.0], [1e-3, 10.0]
    generator = torch.Generator().manual_seed(3)
    direction = random_direction(torch.Size((2, 4, 1, T)), torch.Generator().manual_seed(3))
    for row in analysis.sensitivity_rows(attention, temperatures, epsilons, generator):
        temperature, epsilon, head = row["temperature"], row["epsilon"], row["head"]
        changes = []
        for sequence, query in enumerate(queries[head, T]):
            moved = query.logits + epsilon * direction[sequence, head, 0]
            pair = [
                (vector / temperature).exp() / (vector / temperature).exp().sum() for vector in (moved, query.logits)
            ]
            changes.append(float((pair[0] - pair[1]).norm()) / epsilon)
        assert row["L"] == T and row["sensitivity"] == pytest.approx(mean(changes), rel=1e-6)
        assert row["sensitivity"] <= row["bound"]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 5), st.integers(2, 40))
def test_bounded_logits_bound_the_scaled_weights(seed: int, largest: float, length: int) -> None:
    """Lemma 1: with |logit| at most c, every weight lies between e^(-2c) / L and e^(2c) / L."""
    generator = torch.Generator().manual_seed(seed)
    logits = largest * (2 * torch.rand(1, 1, 1, length, generator=generator, dtype=torch.float64) - 1)
    values = torch.zeros(1, 1, length, 1, dtype=torch.float64)
    attention = SampledAttention(torch.tensor([length - 1]), logits, logits.softmax(dim=-1), values)
    (row,) = analysis.weight_rows(attention)
    assert math.exp(-2 * largest) <= row["scaled_min"] <= 1 + 1e-12
    assert 1 - 1e-12 <= row["scaled_max"] <= math.exp(2 * largest)
