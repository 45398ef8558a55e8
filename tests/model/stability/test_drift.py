"""Sampled logits and their change, and the steps of the `quack` policy in layers with normalised latents."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import ModelConfig, resolve_model
from model.gpt import GPT
from model.initialisation import initialise
from model.parameters import Kind
from model.stability.drift import rms_change, sampled_logits, sampled_positions
from model.stability.policies import quack_ratios
from tests.model.attention.reference import attention_logits


@given(st.integers(1, 300), st.integers(1, 64))
def test_sampled_positions_are_distinct_ascending_and_include_the_last(seq_len: int, num_queries: int) -> None:
    positions = sampled_positions(seq_len, num_queries).tolist()
    assert len(positions) == min(num_queries, seq_len)
    assert positions == sorted(set(positions)) and positions[-1] == seq_len - 1 and positions[0] >= 0


@pytest.mark.parametrize(
    ("seq_len", "num_queries", "expected"),
    [(33, 4, [8, 16, 24, 32]), (31, 3, [10, 20, 30]), (4, 9, [0, 1, 2, 3]), (10, 1, [9])],
)
def test_sampled_positions_are_evenly_spaced(seq_len: int, num_queries: int, expected: list[int]) -> None:
    assert sampled_positions(seq_len, num_queries).tolist() == expected


def test_sampled_logits_of_bf16_inputs_are_computed_in_fp32() -> None:
    q, k = (torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0)).bfloat16() for _ in range(2))
    logits = sampled_logits(q, k, torch.tensor([4]))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), attention_logits(q, k)[:, :, 4:], rtol=1e-6, atol=1e-6)


def test_sampled_logits_and_rms_change_match_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    B, T, H, G, K = 2, 9, 4, 2, 6
    positions = sampled_positions(T, 3)
    tables = []
    for _ in range(2):
        q, k = (torch.randn(B, heads, T, K, generator=generator) for heads in (H, G))
        tables.append((sampled_logits(q, k, positions), attention_logits(q, k)))
    (new, new_expected), (old, old_expected) = tables
    squares = []
    for index, t in enumerate(positions.tolist()):
        expected = new_expected[:, :, t, : t + 1]
        torch.testing.assert_close(new[:, :, index, : t + 1].double(), expected, rtol=1e-4, atol=1e-5)
        assert not new[:, :, index, t + 1 :].any()
        squares += (expected - old_expected[:, :, t, : t + 1]).square().flatten().tolist()
    assert float(rms_change(new, old, positions)) == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-5)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_attention_inputs_are_those_of_the_layers(kind: str, make_model: Callable[..., GPT]) -> None:
    model = make_model(kind=kind)
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        model.logits(tokens)
        expected = list(seen)
        assert all(map(torch.equal, model.attention_inputs(tokens), expected))


def mean_changes(latent_norm: bool, qk_norm: bool, grown: Kind | None, factor: float) -> dict[Kind, float]:
    """Returns the mean |Δlogit| of a small random step of each matrix, scaled by `quack` after one has grown."""
    sizes = {"q_latent_dim": 48, "kv_latent_dim": 40, "nope_dim": 16, "rope_dim": 16, "latent_norm": latent_norm}
    attention = {"kind": "mla", "qk_norm": qk_norm, "mla": sizes}
    model = GPT(
        resolve_model(
            ModelConfig(
                vocab_size=11, dim=128, num_layers=1, num_heads=4, max_seq_len=64, init_std=0.05, attention=attention
            )
        )
    )
    initialise(model, seed=0)
    layer = model.blocks[0].attention
    weights = layer.query_key_weights()
    heads = {Kind.QUERY_UP: 4, Kind.QUERY_ROPE: 4, Kind.KEY_UP: 4}
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 48, 128, generator=generator)
    rotary = model.rotary(torch.arange(48))

    def norms() -> dict[Kind, torch.Tensor]:
        return {
            kind: weight.detach().double().view(heads.get(kind, 1), -1).norm(dim=1)[None]
            for kind, weight in weights.items()
        }

    def logits() -> torch.Tensor:
        q, k = (part.double() for part in layer.project(x, rotary)[:2])
        return q @ k.mT

    steps = {kind: 1e-4 * torch.randn(weight.shape, generator=generator) for kind, weight in weights.items()}
    initial = norms()
    result = {}
    with torch.no_grad():
        if grown is not None:
            weights[grown].mul_(factor)
        ratios = quack_ratios(norms(), initial, qk_norm, kv_latent_dim=40)
        for kind, ratio in ratios.items():
            before, kept = logits(), weights[kind].clone()
            rows = weights[kind].view(heads.get(kind, 1), -1)
            rows.add_(ratio[0].float()[:, None] * steps[kind].view_as(rows))
            result[kind] = float((logits() - before).abs().mean())
            weights[kind].copy_(kept)
    return result


@pytest.mark.parametrize("latent_norm", [True, False])
@pytest.mark.parametrize("grown", [Kind.QUERY_DOWN, Kind.KV_DOWN, Kind.QUERY_UP, Kind.KEY_UP, Kind.KEY_ROPE])
@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_scaled_steps_change_the_logits_as_much_as_at_the_start(latent_norm: bool, grown: Kind, factor: float) -> None:
    at_start = mean_changes(latent_norm, False, None, 1.0)
    for kind, change in mean_changes(latent_norm, False, grown, factor).items():
        # W_dq changes both parts of the logits; its factor bounds only the larger part.
        tolerance = 3.5 if kind is Kind.QUERY_DOWN and grown not in (Kind.QUERY_DOWN, Kind.KV_DOWN) else 1.005
        if kind is Kind.QUERY_DOWN and grown is Kind.KV_DOWN and not latent_norm:
            tolerance = 3.5
        assert 1 / tolerance < change / at_start[kind] < tolerance, kind


@pytest.mark.parametrize("latent_norm", [True, False])
@pytest.mark.parametrize("grown", [Kind.QUERY_DOWN, Kind.KV_DOWN, Kind.QUERY_UP, Kind.KEY_UP, Kind.KEY_ROPE])
@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_scaled_steps_with_query_key_norms_change_the_logits_about_as_much(
    latent_norm: bool, grown: Kind, factor: float
) -> None:
    """The policy ignores that a step also changes the norm that a head is divided by."""
    at_start = mean_changes(latent_norm, True, None, 1.0)
    changes = mean_changes(latent_norm, True, grown, factor)
    assert changes[grown] / at_start[grown] == pytest.approx(1, abs=0.05)
    for kind, change in changes.items():
        assert 0.5 < change / at_start[kind] < 1.7, kind
