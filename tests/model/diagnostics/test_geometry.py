"""Distances, separability and sensitivity, compared with loops in float64, and their bounds, on random inputs."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.diagnostics import geometry
from model.diagnostics.sensitivity import (
    gradient_sensitivity,
    jacobian_norm_bracket,
    random_direction,
    sensitivity_bound,
)
from tests.model.diagnostics.reference import separable_share, set_distance


class Head(NamedTuple):
    """A random attention pattern (B, H, Q, T) = (2, 2, 3, 12) and its values of width 5."""

    weights: Tensor
    values: Tensor
    positions: Tensor


def random_head(seed: int, sharpness: float = 2.0, unit_values: bool = False) -> Head:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor([7, 9, 11])
    logits = sharpness * torch.randn(2, 2, 3, 12, generator=generator, dtype=torch.float64)
    hidden = torch.arange(12) > positions[:, None]
    values = torch.randn(2, 2, 12, 5, generator=generator, dtype=torch.float64)
    if unit_values:
        values = torch.nn.functional.normalize(values, dim=-1)
    return Head(logits.masked_fill(hidden, -torch.inf).softmax(dim=-1), values, positions)


def points_of(head: Head, row: int, h: int, query: int) -> list[Tensor]:
    """Returns α_i x_i of the visible tokens."""
    num_visible = int(head.positions[query]) + 1
    return [head.weights[row, h, query, i] * head.values[row, h, i] for i in range(num_visible)]


def all_queries() -> list[tuple[int, int, int]]:
    return list(itertools.product(range(2), range(2), range(3)))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 7), st.floats(0.1, 6))
def test_distance_matches_loops_and_stays_below_its_bound(seed: int, size: int, sharpness: float) -> None:
    head = random_head(seed, sharpness)
    chosen = geometry.top_set(head.weights, size)
    distance = geometry.set_distance(*head, chosen)
    for row, h, query in all_queries():
        members = chosen[row, h, query].nonzero().flatten().tolist()
        assert len(members) == size
        smallest_inside = float(head.weights[row, h, query, members].min())
        outside = [i for i in range(int(head.positions[query]) + 1) if i not in members]
        assert all(float(head.weights[row, h, query, i]) <= smallest_inside for i in outside)
        expected = set_distance(points_of(head, row, h, query), members)
        assert float(distance[row, h, query]) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert (distance <= geometry.distance_bound(*head, chosen) + 1e-9).all()


def test_random_sets_are_visible_and_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(6)
    for _ in range(3000):
        chosen = geometry.random_set(torch.tensor([5]), torch.Size((1, 1, 1, 9)), 2, generator)[0, 0, 0]
        assert chosen.sum() == 2 and not chosen[6:].any()
        counts += chosen[:6]
    assert counts.tolist() == pytest.approx([1000] * 6, abs=120)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_random_distance_estimate_is_a_lower_bound_of_the_expectation(seed: int, size: int) -> None:
    head = random_head(seed)
    estimate = geometry.random_distance_estimate(*head, size)
    for row, h, query in [(0, 0, 0), (1, 1, 2)]:
        points = points_of(head, row, h, query)
        sets = list(itertools.combinations(range(len(points)), size))
        expectation = sum(set_distance(points, list(members)) for members in sets) / len(sets)
        c = size / (len(points) - 1)
        mean = sum(points)
        expected = sum(float(((1 + c) * point - c * mean).norm()) for point in points)
        expected *= (len(points) - size) / len(points)
        assert float(estimate[row, h, query]) == pytest.approx(expected, rel=1e-6)
        assert expected <= expectation + 1e-9


def test_mean_random_distance_approaches_the_expectation() -> None:
    head = random_head(3)
    found = geometry.random_distance(*head, size=3, num_sets=400, generator=torch.Generator().manual_seed(1))
    points = points_of(head, 0, 0, 0)
    sets = list(itertools.combinations(range(len(points)), 3))
    expectation = sum(set_distance(points, list(members)) for members in sets) / len(sets)
    assert float(found[0, 0, 0]) == pytest.approx(expectation, rel=0.05)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 7), st.floats(0.1, 5))
def test_separability_matches_loops_and_stays_above_its_lower_bound(seed: int, size: int, sharpness: float) -> None:
    head = random_head(seed, sharpness, unit_values=True)
    found = geometry.separability(*head, size)
    chosen = geometry.top_set(head.weights, size)
    for row, h, query in all_queries():
        points = points_of(head, row, h, query)
        members = chosen[row, h, query].nonzero().flatten().tolist()
        centre = sum(points[i] for i in members)
        radius = min(float((p - centre).norm()) for i, p in enumerate(points) if i not in members)
        assert float(found.share[row, h, query]) == pytest.approx(separable_share(points, members))
        alphas = {i: float(head.weights[row, h, query, i]) for i in members}
        units = head.values[row, h]
        delta = min(float((units[i] - units[j]).norm()) for i, j in itertools.combinations(members, 2))
        xis = []
        for i in members:
            a = sum(alphas[j] for j in members if j != i)
            q = sum(alphas[j] ** 2 for j in members if j != i)
            xis.append(math.sqrt(max(q + (1 - delta**2 / 2) * (a**2 - q), 0.0)))
        assert float(found.lower_bound[row, h, query]) == pytest.approx(1 - sum(xis) / (radius * size), rel=1e-5)
        estimate = [math.exp(-((radius - xi) ** 2) / 16) if radius < xi else 1.0 for xi in xis]
        assert float(found.upper_estimate[row, h, query]) == pytest.approx(sum(estimate) / size, rel=1e-6)
    assert (found.share >= found.lower_bound - 1e-9).all()


@settings(deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.01, 0.1, 1.0, 10.0]),
    st.sampled_from([1e-3, 1e-1, 10.0]),
    st.integers(2, 50),
)
def test_sensitivity_stays_below_its_bound(seed: int, temperature: float, epsilon: float, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, num_tokens, generator=generator, dtype=torch.float64)
    direction = random_direction(logits.shape, generator)
    torch.testing.assert_close(direction.norm(dim=-1), torch.ones(4, dtype=torch.float64))
    found = gradient_sensitivity(logits, temperature, epsilon, direction)
    assert (found <= sensitivity_bound(temperature, epsilon) * (1 + 1e-9)).all()
    weights = (logits / temperature).softmax(dim=-1)
    jacobian = (torch.diag_embed(weights) - weights.unsqueeze(-1) * weights.unsqueeze(-2)) / temperature
    spectral = torch.linalg.matrix_norm(jacobian, ord=2)
    lower, upper = jacobian_norm_bracket(weights, temperature)
    assert (lower <= spectral * (1 + 1e-9) + 1e-12).all() and (spectral <= upper * (1 + 1e-9) + 1e-12).all()


def test_the_sensitivity_bound_is_tight() -> None:
    logits = torch.tensor([0.0, 0.0], dtype=torch.float64)
    direction = torch.tensor([0.5**0.5, -(0.5**0.5)], dtype=torch.float64)
    assert float(gradient_sensitivity(logits, 1.0, 1e-6, direction)) == pytest.approx(0.5, rel=1e-6)
