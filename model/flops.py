"""Floating-point operations of training, from the configuration alone."""

from __future__ import annotations

from configs.schema import ModelConfig


def num_matmul_parameters(config: ModelConfig) -> int:
    """Weights that multiply every token: all matrices of the blocks and the output head, tied or not.

    The embedding is a look-up, not a product.
    """
    assert config.num_kv_heads is not None, "the configuration must be resolved"
    assert config.head_dim is not None, "the configuration must be resolved"
    assert config.ffn_dim is not None, "the configuration must be resolved"
    assert config.vocab_size is not None, "the vocabulary size must be known"
    query_and_output = 2 * config.dim * config.num_heads * config.head_dim
    key_and_value = 2 * config.dim * config.num_kv_heads * config.head_dim
    feed_forward = 3 * config.dim * config.ffn_dim
    return config.num_layers * (query_and_output + key_and_value + feed_forward) + config.vocab_size * config.dim


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Matrix-product FLOPs per token of one forward and backward pass (PaLM, arXiv 2204.02311, appendix B).

    Counted: 2 FLOPs per weight and token forward and 4 backward; and the two products of attention (queries
    with keys, probabilities with values) over the visible positions, forward once and backward twice. A
    causal token sees (seq_len + 1) / 2 positions on average; PaLM counts all seq_len.
    Not counted: norms, softmax, rotation and other elementwise work, the optimizer, and recomputation (by
    activation checkpointing or inside attention kernels).

    Args:
        config: resolved sizes with a vocabulary size.
        seq_len: tokens of a sequence.
    """
    assert config.head_dim is not None, "the configuration must be resolved"
    # 3 passes x 2 products x 2 FLOPs x (seq_len + 1) / 2 positions x the width of all heads
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * (seq_len + 1)
    return 6 * num_matmul_parameters(config) + attention
