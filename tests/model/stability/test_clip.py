"""QK-Clip: the largest logits, the clipping factors, and their effect on the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention.rotary import rotary_table
from model.gpt import GPT
from model.parameters import Kind
from model.stability import clip
from model.stability.clip import LogitMaxima, attach_logit_maxima, causal_logit_maxima, clip_factors, logit_factor
from tests.model.attention.reference import largest_logits


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 7, 64, 1 << 24]), st.floats(0.05, 6.0))
def test_maxima_above_the_threshold_are_exact(seed: int, chunk: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(3, 4, 1, 1, generator=generator) * 2
    q, k = torch.randn(3, 4, 11, 6, generator=generator) * scale, torch.randn(3, 2, 11, 6, generator=generator)
    expected = largest_logits(q, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "CHUNK_ELEMENTS", chunk)
        found = causal_logit_maxima(q, k, threshold)
    passes = expected > threshold
    torch.testing.assert_close(found[passes].double(), expected[passes], rtol=1e-5, atol=1e-6)
    is_known = ~found.isinf()
    torch.testing.assert_close(found[is_known].double(), expected[is_known], rtol=1e-5, atol=1e-6)


def test_heads_whose_bound_is_below_the_threshold_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[int] = []
    exact = clip._causal_maxima
    monkeypatch.setattr(clip, "_causal_maxima", lambda q, *rest: (heads.append(len(q)), exact(q, *rest))[1])
    q = torch.ones(1, 3, 5, 4) * torch.tensor([0.1, 1.0, 10.0]).view(1, 3, 1, 1)
    assert causal_logit_maxima(q, torch.ones(1, 3, 5, 4), threshold=2.5).tolist()[0][2] == pytest.approx(20.0)
    assert heads == [1]


def test_bounds_are_not_rounded_to_bf16() -> None:
    """The norm of (1, 1/16) rounds to 1 in bf16, where the bound would be below the threshold."""
    q = torch.tensor([1.0, 0.0625], dtype=torch.bfloat16).view(1, 1, 1, 2)
    found = causal_logit_maxima(q, q, threshold=0.708)
    assert found.item() == pytest.approx((1 + 0.0625**2) / 2**0.5, rel=1e-6)


@pytest.mark.parametrize(("length", "width"), [(2, 40), (40, 2)])
def test_the_bound_is_that_of_cauchy_and_schwarz(length: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It equals the logits of constant vectors, so a threshold just above them skips the head."""
    computed: list[int] = []
    exact = clip._causal_maxima
    monkeypatch.setattr(clip, "_causal_maxima", lambda q, *rest: (computed.append(len(q)), exact(q, *rest))[1])
    q = torch.ones(1, 1, length, width)
    logit = width**0.5
    assert causal_logit_maxima(q, q, threshold=0.99 * logit).item() == pytest.approx(logit)
    assert computed == [1]
    assert causal_logit_maxima(q, q, threshold=1.01 * logit).item() == -torch.inf
    assert computed == [1]


def test_masked_rows_and_heads_below_the_threshold_are_both_skipped() -> None:
    q = torch.tensor([[1.0, 5.0], [5.0, 5.0]]).view(2, 2, 1, 1)
    k = torch.ones(2, 2, 1, 1)
    found = causal_logit_maxima(q, k, threshold=2.0, row_mask_B=torch.tensor([True, False]))
    assert found.tolist() == [[-torch.inf, 5.0], [-torch.inf, -torch.inf]]


class Products(TorchDispatchMode):
    """Records the size of the result of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "bmm"):
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize(
    ("chunk_elements", "expected"),
    [
        (16 * 16 * 3, [3 * 16 * 16, 3 * 16 * 16, 2 * 16 * 16]),  # three heads at a time
        (100, [6 * 6, 6 * 12, 4 * 16] * 8),  # six queries of one head at a time
        (1, list(range(1, 17)) * 8),  # at least one query
    ],
)
def test_the_number_of_logits_at_once_is_limited(
    chunk_elements: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip, "CHUNK_ELEMENTS", chunk_elements)
    q = torch.ones(2, 4, 16, 3)
    with Products() as products:
        causal_logit_maxima(q, q, threshold=0.0)
    assert products.sizes == expected


def test_maxima_are_minus_infinity_if_no_bound_exceeds_the_threshold() -> None:
    q = torch.ones(2, 3, 5, 4)
    assert causal_logit_maxima(q, q, threshold=1e6).isinf().all()


def test_masked_rows_do_not_count_and_reset_clears_the_maxima() -> None:
    maxima = LogitMaxima(1, threshold=1.0, device=torch.device("cpu"))
    q = torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    maxima.row_mask_B = torch.tensor([True, False])
    maxima.update(q, 3 * torch.ones(2, 1, 1, 1))
    assert maxima.max_H.tolist() == [3.0]
    maxima.row_mask_B = None
    maxima.update(q, 3 * torch.ones(2, 1, 1, 1))
    maxima.update(q, torch.ones(2, 1, 1, 1))
    assert maxima.max_H.tolist() == [15.0]
    maxima.reset()
    assert maxima.max_H.tolist() == [-torch.inf]


def test_clip_factors_of_latent_and_grouped_attention() -> None:
    maxima = torch.tensor([[50.0, 200.0, -torch.inf, -400.0], [100.0, 400.0, 1600.0, 100.0]])
    latent = clip_factors(maxima, 100.0, num_key_heads=None)
    torch.testing.assert_close(latent[Kind.QUERY_ROPE], torch.tensor([[1, 0.5, 1, 1], [1, 0.25, 0.0625, 1]]))
    torch.testing.assert_close(latent[Kind.KEY_UP], latent[Kind.QUERY_ROPE].sqrt())
    assert set(latent) == {Kind.QUERY_UP, Kind.KEY_UP, Kind.QUERY_ROPE}
    grouped = clip_factors(maxima, 100.0, num_key_heads=2)
    torch.testing.assert_close(grouped[Kind.KEY], torch.tensor([[0.5**0.5, 1], [0.5, 0.25]]))
    torch.testing.assert_close(grouped[Kind.QUERY], grouped[Kind.KEY].repeat_interleave(2, dim=1))


@pytest.mark.parametrize("num_key_heads", [None, 2, 4])
def test_logit_factor_is_the_product_of_the_factors_of_a_query_and_its_key(num_key_heads: int | None) -> None:
    maxima = torch.tensor([[50.0, 200.0, -torch.inf, 400.0]])
    factors = clip_factors(maxima, 100.0, num_key_heads)
    if num_key_heads is None:
        expected = factors[Kind.QUERY_UP] * factors[Kind.KEY_UP]
        torch.testing.assert_close(expected, factors[Kind.QUERY_ROPE])
    else:
        expected = factors[Kind.QUERY] * factors[Kind.KEY].repeat_interleave(4 // num_key_heads, dim=1)
    torch.testing.assert_close(logit_factor(factors), expected)


@pytest.mark.parametrize(
    "model_keys", [{}, {"num_kv_heads": 2}, {"kind": "mla"}, {"kind": "mla", "mla": {"q_latent_dim": 12}}]
)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_clipping_after_a_training_pass_brings_the_largest_logit_to_the_threshold(
    model_keys: dict,
    activation_checkpointing: bool,
    is_compiled: bool,
    make_model: Callable[..., GPT],
    batch: tuple,
) -> None:
    model = make_model(activation_checkpointing, **model_keys)
    if is_compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    layers = attach_logit_maxima(model, 0.05, torch.device("cpu"))
    assert len(layers) == 2
    model.eval()
    model(*batch)
    assert all(layer.max_H.isinf().all() for layer in layers), "evaluation must not count"
    model.train()
    model(*batch)[0].backward()
    inputs = [x.detach() for x in model.attention_inputs(batch[0])]
    rotary = rotary_table(torch.arange(40), model.rotary_dim, model.config.rope_theta)
    for block, x, layer in zip(model.blocks, inputs, layers, strict=True):
        attention = block.attention
        q, k, _ = attention.project(x, rotary)
        expected = largest_logits(q.detach(), k.detach()).amax(dim=0)
        torch.testing.assert_close(layer.max_H.double(), expected, rtol=1e-4, atol=1e-5)
        threshold = float(layer.max_H.sort().values[1:3].mean())  # between the heads
        num_key_heads = None if model.config.attention.kind == "mla" else model.config.num_kv_heads
        factors = clip_factors(layer.max_H[None], threshold, num_key_heads)
        with torch.no_grad():
            for kind, weight in attention.query_key_weights().items():
                if kind in factors:
                    heads = weight.view(factors[kind].shape[1], -1)
                    heads.mul_(factors[kind][0][:, None])
            q, k, _ = attention.project(x, rotary)
        largest = largest_logits(q, k).amax(dim=0)
        assert float(largest.max()) == pytest.approx(threshold, rel=1e-3)
