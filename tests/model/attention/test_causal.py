"""Fused causal attention, compared with the formulas in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import profile

from model.attention.causal import causal_attention
from model.attention.sink import prepend_sink
from tests.model.attention.reference import attention_logits, causal_mask, reference_attention


@given(
    num_kv_heads=st.integers(1, 3),
    num_queries_per_key=st.integers(1, 3),
    num_queries=st.integers(1, 9),
    num_cached=st.integers(0, 5),
    head_dim=st.sampled_from([2, 6, 16]),
    value_dim=st.sampled_from([None, 1, 7, 20]),
    softcap=st.sampled_from([None, None, 0.7, 30.0]),
    has_sink=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_values_and_gradients_match_the_formula(
    num_kv_heads, num_queries_per_key, num_queries, num_cached, head_dim, value_dim, softcap, has_sink
):
    generator = torch.Generator().manual_seed(0)
    num_keys, num_heads = num_cached + num_queries, num_kv_heads * num_queries_per_key

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k = random(2, num_heads, num_queries, head_dim), random(2, num_kv_heads, num_keys, head_dim)
    v = random(2, num_kv_heads, num_keys, value_dim or head_dim)
    inputs = [q, k, v, random(num_heads)] if has_sink else [q, k, v]
    sink = inputs[3] if has_sink else None

    actual, expected = causal_attention(q, k, v, softcap, sink), reference_attention(q, k, v, softcap, sink)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(actual, inputs, weights)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, weights), rtol=1e-9, atol=1e-9)

    in_fp32 = causal_attention(q.float(), k.float(), v.float(), softcap, None if sink is None else sink.float())
    assert in_fp32.dtype == torch.float32
    torch.testing.assert_close(in_fp32.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_sink_multiplies_the_output_by_a_sigmoid():
    """softmax([s ; b]) without its last weight is softmax(s) σ(logsumexp(s) - b)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 6, generator=generator)
    sink_H = torch.tensor([-3.0, 0.0, 1.0, 5.0])
    logits_BHTT = attention_logits(q, k).masked_fill(~causal_mask(9, 9), -torch.inf)
    share_BHT = (logits_BHTT.logsumexp(-1) - sink_H[:, None]).sigmoid()
    expected = (causal_attention(q, k, v) * share_BHT.unsqueeze(-1)).float()
    torch.testing.assert_close(causal_attention(q, k, v, sink_H=sink_H), expected, rtol=1e-5, atol=1e-5)
    negligible = causal_attention(q, k, v, sink_H=torch.full((4,), -40.0))
    torch.testing.assert_close(negligible, causal_attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_a_sink_uses_the_flash_kernel_without_a_mask_tensor():
    """The causal mask stays square, and widths are multiples of 8, which GPU kernels need."""
    q, k, v = torch.randn(3, 2, 4, 9, 6)
    wide_q, wide_k, wide_v = prepend_sink(q, k[:, :2], v[:, :2], torch.zeros(4))
    assert (wide_q.shape, wide_k.shape, wide_v.shape) == ((2, 4, 10, 8), (2, 2, 10, 8), (2, 2, 10, 6))
    with profile() as profiler:
        causal_attention(q, k, v, sink_H=torch.zeros(4))
    calls = {event.key for event in profiler.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in calls
    assert "aten::tril" not in calls


def test_a_large_softcap_has_no_effect():
    q, k, v = torch.randn(3, 2, 4, 9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(causal_attention(q, k, v, softcap=1e6), causal_attention(q, k, v))
