import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention.causal import causal_attention


def reference_attention(q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
    """Explicit softmax attention in float64 with the queries at the last T of S positions."""
    num_queries_per_key = q_BHTK.shape[1] // k_BGSK.shape[1]
    k_BHSK = k_BGSK.double().repeat_interleave(num_queries_per_key, dim=1)
    v_BHSV = v_BGSV.double().repeat_interleave(num_queries_per_key, dim=1)
    T, S = q_BHTK.shape[2], k_BHSK.shape[2]
    scores_BHTS = q_BHTK.double() @ k_BHSK.transpose(2, 3) / q_BHTK.shape[3] ** 0.5
    is_later_TS = torch.arange(S) > torch.arange(S - T, S)[:, None]
    return scores_BHTS.masked_fill(is_later_TS, -torch.inf).softmax(-1) @ v_BHSV


@given(
    num_kv_heads=st.integers(1, 3),
    num_queries_per_key=st.integers(1, 3),
    num_queries=st.integers(1, 9),
    num_cached=st.integers(0, 5),
    head_dim=st.sampled_from([2, 6, 16]),
    value_dim=st.sampled_from([None, 1, 7, 20]),
)
@settings(max_examples=60, deadline=None)
def test_attention_equals_the_formula(num_kv_heads, num_queries_per_key, num_queries, num_cached, head_dim, value_dim):
    generator = torch.Generator().manual_seed(0)
    num_keys = num_cached + num_queries
    q = torch.randn(2, num_kv_heads * num_queries_per_key, num_queries, head_dim, generator=generator)
    k = torch.randn(2, num_kv_heads, num_keys, head_dim, generator=generator)
    v = torch.randn(2, num_kv_heads, num_keys, value_dim or head_dim, generator=generator)
    assert torch.allclose(causal_attention(q, k, v).double(), reference_attention(q, k, v), atol=1e-5)
