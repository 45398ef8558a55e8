"""FLOP counts, compared with PyTorch's counter and with a known model."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.flops import flops_per_token, num_matmul_parameters
from model.gpt import GPT


def addmm_flops(sum_shape: torch.Size, left_shape: torch.Size, right_shape: torch.Size, **_: object) -> int:
    return 2 * left_shape[0] * left_shape[1] * right_shape[1]


@pytest.mark.parametrize(
    ("keys", "query_key_dim", "value_dim"),
    [
        ({}, 8, 8),
        ({"num_kv_heads": 2, "head_dim": 10, "tie_embeddings": True, "qk_norm": True}, 10, 10),
        ({"kind": "mla"}, 8 + 4, 8),
        ({"kind": "mla", "mla": {"q_latent_dim": 12, "value_dim": 20}, "qk_norm": True}, 8 + 4, 20),
        ({"num_kv_heads": 2, "head_dim": 10, "options": {"gated": True, "ssmax": True}}, 10, 10),
        ({"kind": "mla", "mla": {"value_dim": 20}, "options": {"gated": True, "ssmax": True}}, 8 + 4, 20),
    ],
)
def test_flops_match_those_counted_by_torch(make_model, batch, keys, query_key_dim, value_dim):
    """The counter includes every product that runs: all T x T scores, and heads padded to equal widths."""
    model = make_model(**keys)
    B, T = batch[0].shape
    # The counter supports addmm but not its in-place form, which accumulates the gradient of the output head.
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops})
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(*batch)[0].backward()

    config = model.config
    per_head_and_position = 6 * config.num_layers * config.num_heads
    visible_positions = sum(range(1, T + 1)) / T
    causal_attention = per_head_and_position * (query_key_dim + value_dim) * visible_positions
    padded_attention = per_head_and_position * 2 * max(query_key_dim, value_dim) * T
    assert counter.get_total_flops() == B * T * (flops_per_token(config, T) - causal_attention + padded_attention)


def test_llama_2_7b_has_the_expected_flops(make_config):
    """It has 6,738,415,616 parameters, of which 131,072,000 are in the embedding and 266,240 are gains."""
    config = make_config(vocab_size=32000, dim=4096, num_layers=32, num_heads=32, ffn_dim=11008, max_seq_len=4096)
    with torch.device("meta"):
        assert GPT(config).num_parameters == 6_738_415_616
    assert num_matmul_parameters(config) == 6_738_415_616 - 131_072_000 - 266_240
    assert flops_per_token(config, 4096) == 6 * 6_607_077_376 + 6 * 32 * 4096 * 4097
