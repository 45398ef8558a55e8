"""Sampled logits and their change, against loops; and what the rule for normalised latents promises."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.attention.rotary import rotary_table
from model.gpt import GPT
from model.parameters import Kind
from model.stability.drift import rms_change, sampled_logits, sampled_positions
from model.stability.policies import LATENT_GAINS, quack_ratios


@given(st.integers(1, 300), st.integers(1, 64))
def test_positions_are_distinct_ascending_and_end_at_the_last(seq_len: int, num_queries: int) -> None:
    positions = sampled_positions(seq_len, num_queries).tolist()
    assert len(positions) == min(num_queries, seq_len)
    assert positions == sorted(set(positions)) and positions[-1] == seq_len - 1 and positions[0] >= 0


def test_logits_and_rms_are_those_of_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    B, T, H, G, K = 2, 9, 4, 2, 6
    positions = sampled_positions(T, 3)
    tables = []
    for _ in range(2):
        q, k = (torch.randn(B, heads, T, K, generator=generator) for heads in (H, G))
        loops = {
            (b, h, t, s): sum(float(q[b, h, t, i]) * float(k[b, h // 2, s, i]) for i in range(K)) / math.sqrt(K)
            for b in range(B)
            for h in range(H)
            for t in positions.tolist()
            for s in range(t + 1)
        }
        tables.append((sampled_logits(q, k, positions), loops))
    (new, new_loops), (old, old_loops) = tables
    for (b, h, t, s), value in new_loops.items():
        assert float(new[b, h, positions.tolist().index(t), s]) == pytest.approx(value, rel=1e-4, abs=1e-5)
    squares = [(new_loops[key] - old_loops[key]) ** 2 for key in new_loops]
    assert float(rms_change(new, old, positions)) == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-5)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_attention_inputs_are_what_the_layers_get(kind: str, make_model: Callable[..., GPT]) -> None:
    model = make_model(kind=kind)
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        model.logits(tokens)
        expected = list(seen)
        assert all(map(torch.equal, model.attention_inputs(tokens), expected))


@pytest.mark.parametrize("grown", ["query_down", "kv_down"])
def test_with_normalised_latents_logits_move_alike_whatever_the_size_of_the_down_projection(
    grown: str, make_model: Callable[..., GPT]
) -> None:
    """Steps of a fixed size, scaled by the rule, at a down-projection and at one that is four times as large."""
    model = make_model(kind="mla", mla={"q_latent_dim": 12, "kv_latent_dim": 10})
    attention = model.blocks[0].attention
    weights = attention.query_key_weights()
    generator = torch.Generator().manual_seed(3)
    steps = {kind: 1e-4 * torch.randn(weight.shape, generator=generator) for kind, weight in weights.items()}
    x = torch.randn(2, 24, 32, generator=generator)
    rotary = rotary_table(torch.arange(24), attention.rotary_dim, 1e4)
    heads = {Kind.QUERY_UP: 4, Kind.QUERY_ROPE: 4, Kind.KEY_UP: 4}

    def norms() -> dict[Kind, torch.Tensor]:
        return {
            kind: weight.detach().double().view(heads.get(kind, 1), -1).norm(dim=1)[None]
            for kind, weight in weights.items()
        }

    @torch.no_grad()
    def mean_change(is_scaled: bool) -> float:
        ratios = quack_ratios(norms(), initial, has_qk_norm=False)
        before = [part.double() for part in attention.project(x, rotary)[:2]]
        kept = {kind: weight.clone() for kind, weight in weights.items()}
        for kind, weight in weights.items():
            if kind not in LATENT_GAINS:
                rows = weight.view(heads.get(kind, 1), -1)
                ratio = ratios[kind][0].float()[:, None] if is_scaled else 1.0
                rows.add_(ratio * steps[kind].view_as(rows))
        after = [part.double() for part in attention.project(x, rotary)[:2]]
        for kind, weight in weights.items():
            weight.copy_(kept[kind])
        return float((after[0] @ after[1].mT - before[0] @ before[1].mT).abs().mean())

    initial = norms()
    at_start = mean_change(is_scaled=True)
    with torch.no_grad():
        weights[Kind(grown)].mul_(4)
    assert mean_change(is_scaled=True) == pytest.approx(at_start, rel=0.02)
    assert mean_change(is_scaled=False) < 0.98 * at_start, "steps without the rule would have stayed alike"
