"""The layouts of query/key weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from model.gpt import GPT
from model.parameters import Kind, collect_specs
from model.stability.layers import HeadLayout, collect_layouts


def layouts_of(model: nn.Module) -> dict[Kind, HeadLayout]:
    specs = collect_specs(model)
    heads = {name: spec.num_heads for name, spec in specs.items()}
    return collect_layouts(model, heads, {name: parameter.numel() for name, parameter in model.named_parameters()})


def names(matrix: str) -> tuple[str, ...]:
    return tuple(f"blocks.{layer}.attention.{matrix}.weight" for layer in range(2))


def test_layouts_of_grouped_queries(make_model: Callable[..., GPT]) -> None:
    assert layouts_of(make_model(num_kv_heads=2, head_dim=10)) == {
        Kind.QUERY: HeadLayout(names("query"), 4, 10 * 32),
        Kind.KEY: HeadLayout(names("key"), 2, 10 * 32),
    }


def test_layouts_of_latent_attention(make_model: Callable[..., GPT]) -> None:
    """Matrices that are not split by head, and gains, count as one head."""
    sizes = {"q_latent_dim": 12, "kv_latent_dim": 14, "nope_dim": 6, "rope_dim": 4}
    assert layouts_of(make_model(kind="mla", mla=sizes)) == {
        Kind.QUERY_DOWN: HeadLayout(names("query_down"), 1, 12 * 32),
        Kind.QUERY_LATENT_GAIN: HeadLayout(names("query_latent_norm"), 1, 12),
        Kind.QUERY_UP: HeadLayout(names("query_up"), 4, 6 * 12),
        Kind.QUERY_ROPE: HeadLayout(names("query_rope"), 4, 4 * 12),
        Kind.KV_DOWN: HeadLayout(names("kv_down"), 1, 14 * 32),
        Kind.KV_LATENT_GAIN: HeadLayout(names("kv_latent_norm"), 1, 14),
        Kind.KEY_UP: HeadLayout(names("key_up"), 4, 6 * 14),
        Kind.KEY_ROPE: HeadLayout(names("key_rope"), 1, 4 * 32),
    }


def test_layouts_of_a_single_layer_have_integer_sizes(make_model: Callable[..., GPT]) -> None:
    layouts = layouts_of(make_model(num_layers=1))
    assert layouts[Kind.QUERY] == HeadLayout(("blocks.0.attention.query.weight",), 4, 8 * 32)
    assert all(isinstance(layout.numel, int) for layout in layouts.values())


def test_a_model_without_attention_raises() -> None:
    with pytest.raises(ValueError, match=r"^the model has no attention layer that declares query/key weights$"):
        collect_layouts(nn.Linear(2, 2), {}, {})
