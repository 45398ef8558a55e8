"""Decoding with multi-head and grouped-query attention."""

from itertools import pairwise

import pytest
import torch


@pytest.mark.parametrize("keys", [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "head_dim": 10, "qk_norm": True}])
def test_decoding_with_a_cache_matches_the_full_forward_pass(make_model, batch, keys):
    model, tokens_BT = make_model(**keys), batch[0]
    with torch.no_grad():
        expected = model.logits(tokens_BT)
        cache = model.new_cache(batch_size=3, length=40)
        # The prompt, single tokens, several at once, and the rest one by one.
        bounds = [0, 7, 8, 9, 15, *range(16, 41)]
        parts = [model.logits(tokens_BT[:, a:b], cache) for a, b in pairwise(bounds)]
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=2e-5)
    assert cache.length == 40


def test_decoding_in_bf16_and_under_autocast_is_close_to_fp32(make_model, batch):
    model, tokens_BT = make_model(num_kv_heads=2), batch[0]
    expected = model.logits(tokens_BT)

    def decode() -> torch.Tensor:
        cache = model.new_cache(batch_size=3, length=40)
        return torch.cat([model.logits(tokens_BT[:, :39], cache), model.logits(tokens_BT[:, 39:], cache)], dim=1)

    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = decode()
        model.bfloat16()
        in_bf16 = decode()
    for logits in (under_autocast, in_bf16):
        assert (logits.float() - expected).abs().mean() < 0.05 * expected.std()


def test_the_cache_has_the_expected_size_dtype_and_device(make_model):
    model = make_model(num_kv_heads=2, head_dim=10)
    # 2 layers, key and value, 2 heads of width 10
    assert model.new_cache(batch_size=3, length=5).num_bytes_per_token == 2 * 2 * 2 * 10 * 4
    assert model.new_cache(batch_size=1, dtype=torch.bfloat16).num_bytes_per_token == 2 * 2 * 2 * 10 * 2
    on_meta = model.new_cache(batch_size=1, device="meta")
    assert all(tensor.is_meta for tensor in on_meta.layers[0].tensors)
    assert on_meta.max_length == 48


def test_exceeding_the_cache_raises(make_model):
    model = make_model()
    with pytest.raises(ValueError, match="6 tokens exceed the maximum context of 5"):
        model.logits(torch.zeros(1, 6, dtype=torch.long), model.new_cache(1, length=5))
