"""QuacK's ratios, compared with the paper's algorithms, and operations on shards of heads."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.parameters import Kind
from model.stability.heads import add_squared_norms, head_ranges, scale_heads, scale_step
from model.stability.policies import quack_ratios

L, H, G = 2, 4, 2


def random_norms(kinds: dict[Kind, int], seed: int) -> dict[Kind, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        kind: 0.5 + 2 * torch.rand(L, heads, generator=generator, dtype=torch.float64) for kind, heads in kinds.items()
    }


MHA = {Kind.QUERY: H, Kind.KEY: H}
GQA = {Kind.QUERY: H, Kind.KEY: G}
MLA = {
    Kind.QUERY_DOWN: 1,
    Kind.QUERY_UP: H,
    Kind.QUERY_ROPE: H,
    Kind.KV_DOWN: 1,
    Kind.KEY_UP: H,
    Kind.KEY_ROPE: 1,
}


def test_mha_ratios_match_algorithm_1() -> None:
    start, now = random_norms(MHA, 1), random_norms(MHA, 2)
    ratios = quack_ratios(now, start, has_qk_norm=False)
    for layer in range(L):
        for head in range(H):
            assert ratios[Kind.QUERY][layer, head] == pytest.approx(
                float(start[Kind.KEY][layer, head] / now[Kind.KEY][layer, head])
            )
            assert ratios[Kind.KEY][layer, head] == pytest.approx(
                float(start[Kind.QUERY][layer, head] / now[Kind.QUERY][layer, head])
            )


def test_a_shared_key_head_depends_on_its_largest_query_head() -> None:
    start, now = random_norms(GQA, 1), random_norms(GQA, 2)
    ratios = quack_ratios(now, start, has_qk_norm=False)
    for layer in range(L):
        for group in range(G):
            members = slice(2 * group, 2 * group + 2)
            expected = max(start[Kind.QUERY][layer, members]) / max(now[Kind.QUERY][layer, members])
            assert ratios[Kind.KEY][layer, group] == pytest.approx(float(expected))
            for head in (2 * group, 2 * group + 1):
                expected = start[Kind.KEY][layer, group] / now[Kind.KEY][layer, group]
                assert ratios[Kind.QUERY][layer, head] == pytest.approx(float(expected))


def algorithm_2(norms: dict[Kind, torch.Tensor], layer: int) -> dict[Kind, list[float]]:
    """Returns the factors of the paper's algorithm 2, head by head."""
    n = {kind: [float(value) for value in table[layer]] for kind, table in norms.items()}
    dq, dkv, kr = n[Kind.QUERY_DOWN][0], n[Kind.KV_DOWN][0], n[Kind.KEY_ROPE][0]
    uq, uk, qr = n[Kind.QUERY_UP], n[Kind.KEY_UP], n[Kind.QUERY_ROPE]
    heads = range(H)
    return {
        Kind.QUERY_UP: [1 / (dq * uk[h] * dkv) for h in heads],
        Kind.KEY_UP: [1 / (uq[h] * dq * dkv) for h in heads],
        Kind.QUERY_ROPE: [1 / (dq * kr) for h in heads],
        Kind.QUERY_DOWN: [min(1 / max(uq[h] * uk[h] * dkv for h in heads), 1 / max(qr[h] * kr for h in heads))],
        Kind.KV_DOWN: [1 / max(uq[h] * dq * uk[h] for h in heads)],
        Kind.KEY_ROPE: [1 / max(qr[h] * dq for h in heads)],
    }


def test_mla_ratios_match_algorithm_2() -> None:
    start, now = random_norms(MLA, 1), random_norms(MLA, 2)
    ratios = quack_ratios(now, start, has_qk_norm=False)
    assert ratios.keys() == MLA.keys()
    for layer in range(L):
        expected_now, expected_start = algorithm_2(now, layer), algorithm_2(start, layer)
        for kind in MLA:
            expected = [a / b for a, b in zip(expected_now[kind], expected_start[kind], strict=True)]
            assert ratios[kind][layer].tolist() == pytest.approx(expected), kind


def normalised_mla(norms: dict[Kind, torch.Tensor], layer: int, latent_dim: int) -> dict[Kind, list[float]]:
    """Returns 1 / (largest relative change of a logit per unit step of each matrix), head by head.

    q·k / (n_q n_k) has the terms q_up·W_uk c, with a latent c of norm s, and q_rope·W_kr x, where n_q and n_k are the
    norms of a query and a key.
    """
    n = {kind: [float(value) for value in table[layer]] for kind, table in norms.items()}
    s, kr, latent_growth = n[Kind.KV_DOWN][0], n[Kind.KEY_ROPE][0], 1.0
    if Kind.KV_LATENT_GAIN in n:
        s = n[Kind.KV_LATENT_GAIN][0]
        latent_growth = n[Kind.KV_DOWN][0] / s
    uq, uk, qr = n[Kind.QUERY_UP], n[Kind.KEY_UP], n[Kind.QUERY_ROPE]
    heads = range(H)
    size = [math.hypot(uq[h], qr[h]) * math.hypot(uk[h] * s / math.sqrt(latent_dim), kr) for h in heads]
    return {
        Kind.QUERY_UP: [size[h] / (uk[h] * s) for h in heads],
        Kind.QUERY_ROPE: [size[h] / kr for h in heads],
        Kind.KEY_UP: [size[h] / (uq[h] * s) for h in heads],
        Kind.KEY_ROPE: [1 / max(qr[h] / size[h] for h in heads)],
        Kind.KV_DOWN: [latent_growth / max(uq[h] * uk[h] / size[h] for h in heads)],
        Kind.QUERY_DOWN: [n[Kind.QUERY_DOWN][0]],
    }


@pytest.mark.parametrize("gains", [{}, {Kind.QUERY_LATENT_GAIN: 1, Kind.KV_LATENT_GAIN: 1}], ids=["", "latent_norm"])
def test_mla_ratios_with_query_key_norms_match_the_formulas(gains: dict[Kind, int]) -> None:
    start, now = random_norms({**MLA, **gains}, 1), random_norms({**MLA, **gains}, 2)
    ratios = quack_ratios(now, start, has_qk_norm=True, kv_latent_dim=8)
    assert ratios.keys() == MLA.keys()
    for layer in range(L):
        expected_now, expected_start = normalised_mla(now, layer, 8), normalised_mla(start, layer, 8)
        for kind in MLA:
            expected = [a / b for a, b in zip(expected_now[kind], expected_start[kind], strict=True)]
            assert ratios[kind].shape == (L, MLA[kind])
            assert ratios[kind][layer].tolist() == pytest.approx(expected), kind


def test_with_query_key_norms_the_ratio_of_an_mha_head_is_its_own_growth() -> None:
    start, now = random_norms(GQA, 1), random_norms(GQA, 2)
    for kind, ratio in quack_ratios(now, start, has_qk_norm=True).items():
        torch.testing.assert_close(ratio, now[kind] / start[kind])


def test_without_query_compression_the_norm_of_its_matrix_counts_as_one() -> None:
    start, now = random_norms(MLA, 1), random_norms(MLA, 2)
    for norms in (start, now):
        norms[Kind.QUERY_DOWN] = torch.ones(L, 1, dtype=torch.float64)
    expected = quack_ratios(now, start, has_qk_norm=False)
    for norms in (start, now):
        del norms[Kind.QUERY_DOWN]
    ratios = quack_ratios(now, start, has_qk_norm=False)
    assert Kind.QUERY_DOWN not in ratios
    for kind, ratio in ratios.items():
        assert torch.equal(ratio, expected[kind])


@pytest.mark.parametrize("kinds", [MHA, GQA, MLA, {**MLA, Kind.QUERY_LATENT_GAIN: 1, Kind.KV_LATENT_GAIN: 1}])
@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_ratios_start_at_exactly_one(kinds: dict[Kind, int], has_qk_norm: bool) -> None:
    norms = random_norms(kinds, 3)
    for kind, ratio in quack_ratios(norms, norms, has_qk_norm, kv_latent_dim=8).items():
        assert torch.equal(ratio, torch.ones_like(ratio)), kind
        assert kind not in (Kind.QUERY_LATENT_GAIN, Kind.KV_LATENT_GAIN)


def test_ratios_depend_on_the_gain_of_a_normalised_latent_instead_of_its_matrix() -> None:
    kinds = {**MLA, Kind.QUERY_LATENT_GAIN: 1, Kind.KV_LATENT_GAIN: 1}
    start = random_norms(kinds, 4)
    grown = {**start, Kind.QUERY_DOWN: 4 * start[Kind.QUERY_DOWN]}
    ratios = quack_ratios(grown, start, has_qk_norm=False)
    assert torch.allclose(ratios[Kind.QUERY_DOWN], torch.full((L, 1), 4.0, dtype=torch.float64))
    for kind in (Kind.QUERY_UP, Kind.KEY_UP, Kind.QUERY_ROPE, Kind.KEY_ROPE, Kind.KV_DOWN):
        assert torch.equal(ratios[kind], torch.ones_like(ratios[kind])), kind
    grown = {**start, Kind.QUERY_LATENT_GAIN: 2 * start[Kind.QUERY_LATENT_GAIN]}
    ratios = quack_ratios(grown, start, has_qk_norm=False)
    for kind in MLA:
        assert torch.allclose(ratios[kind], torch.full_like(ratios[kind], 0.5)), kind


def test_max_ratio_limits_only_larger_ratios() -> None:
    start, now = random_norms(MHA, 1), random_norms(MHA, 2)
    free, capped = (quack_ratios(now, start, False, max_ratio) for max_ratio in (None, 1.0))
    assert free[Kind.QUERY].max() > 1 > free[Kind.QUERY].min()
    assert torch.equal(capped[Kind.QUERY], free[Kind.QUERY].clamp(max=1.0))


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 12, [(0, 3, 0, 12)]),
        (2, 9, [(0, 1, 0, 2), (1, 1, 2, 4), (2, 1, 6, 1)]),
        (3, 13, [(0, 1, 0, 1), (1, 2, 1, 8), (3, 1, 9, 1)]),
        (5, 7, [(1, 1, 0, 2)]),
        (8, 8, []),
    ],
)
def test_head_ranges_are_runs_of_whole_heads_and_partial_heads(
    start: int, stop: int, expected: list[tuple[int, int, int, int]]
) -> None:
    assert list(head_ranges(start, stop, 4)) == expected


def test_squared_norms_are_not_rounded_to_the_dtype_of_the_shard() -> None:
    squares = torch.zeros(1, dtype=torch.float64)
    add_squared_norms(torch.tensor([1 + 2.0**-12, 0.0]), 0, 2, squares)
    assert squares.item() == 1 + 2.0**-11 + 2.0**-24  # needs 25 bits
    squares = torch.zeros(1, dtype=torch.float64)
    add_squared_norms(torch.tensor([1.0, 0.0625], dtype=torch.bfloat16), 0, 2, squares)
    assert squares.item() == pytest.approx(1 + 0.0625**2)


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 5), st.data())
def test_operations_on_shards_add_up_to_those_on_the_whole_matrix(
    head_numel: int, heads: int, data: st.DataObject
) -> None:
    matrix = torch.randn(heads * head_numel, generator=torch.Generator().manual_seed(head_numel * 31 + heads))
    cuts = sorted({0, matrix.numel(), *data.draw(st.lists(st.integers(0, matrix.numel()), max_size=4))})
    squares = torch.zeros(heads, dtype=torch.float64)
    old = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(1))
    ratio = torch.linspace(0.25, 1.0, heads)
    scaled, shrunk = matrix.clone(), matrix.clone()
    for start, stop in itertools.pairwise(cuts):
        covered = [number for *_, number in head_ranges(start, stop, head_numel)]
        assert sum(covered) == stop - start
        add_squared_norms(matrix[start:stop], start, head_numel, squares)
        scale_step(scaled[start:stop], old[start:stop], start, head_numel, ratio)
        scale_heads(shrunk[start:stop], start, head_numel, ratio)
    expected = matrix.double().view(heads, head_numel).square().sum(dim=1)
    assert torch.allclose(squares, expected, rtol=1e-6)
    step = (matrix - old).view(heads, head_numel) * ratio[:, None]
    expected_matrix = torch.where(ratio[:, None] == 1, matrix.view(heads, -1), old.view(heads, -1) + step)
    assert torch.equal(scaled.view(heads, -1), expected_matrix)
    assert torch.equal(shrunk.view(heads, -1), matrix.view(heads, -1) * ratio[:, None])


@settings(deadline=None)
@given(st.integers(0, 2**16), st.floats(0.1, 2), st.floats(0.1, 2), st.floats(0.1, 1))
def test_the_change_of_a_logit_respects_the_papers_bound(
    seed: int, tau_q: float, tau_k: float, smallest: float
) -> None:
    """With rates tau / ‖other weight‖, |Δl| sqrt(K) ≤ tau_q D + tau_k D + tau_q tau_k D² / c² for unit inputs.

    With initial norms of 1, the ratio is 1 / ‖other weight‖.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def with_norm(matrix: torch.Tensor, norm: float) -> torch.Tensor:
        return matrix * (norm / matrix.norm())

    query = with_norm(draw(4, 6), smallest * (1 + 3 * float(torch.rand(1, generator=generator))))
    key = with_norm(draw(4, 6), smallest * (1 + 3 * float(torch.rand(1, generator=generator))))
    bound_d = 0.7
    step_q, step_k = (with_norm(draw(4, 6), bound_d) for _ in range(2))
    x, y = (with_norm(draw(6), 1.0) for _ in range(2))
    now = {Kind.QUERY: query.norm().view(1, 1), Kind.KEY: key.norm().view(1, 1)}
    ratios = quack_ratios(now, {kind: torch.ones_like(norm) for kind, norm in now.items()}, has_qk_norm=False)
    new_query = query - tau_q * ratios[Kind.QUERY] * step_q
    new_key = key - tau_k * ratios[Kind.KEY] * step_k
    change = abs((new_query @ x) @ (new_key @ y) - (query @ x) @ (key @ y))
    assert change <= tau_q * bound_d + tau_k * bound_d + tau_q * tau_k * bound_d**2 / smallest**2 + 1e-9
