"""The FLOPs of training, computed from the model's configuration."""

from __future__ import annotations

from configs.schema import ModelConfig
from model.attention.mla import latent_sizes


def num_matmul_parameters(config: ModelConfig) -> int:
    """Returns the number of weights that multiply every token: the blocks' matrices and the output head, tied or not.

    The embedding is a look-up, not a matrix product.
    """
    assert config.ffn_dim is not None, "the configuration must be resolved"
    assert config.vocab_size is not None, "the vocabulary size must be known"
    feed_forward = 3 * config.dim * config.ffn_dim
    return config.num_layers * (_attention_parameters(config) + feed_forward) + config.vocab_size * config.dim


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Returns the matrix-product FLOPs per token of a forward and backward pass (PaLM, arXiv 2204.02311, appendix B).

    The count includes 2 FLOPs per weight and token in the forward pass and 4 in the backward pass, and the two
    products of attention (queries with keys, probabilities with values) over the visible positions, once in the
    forward pass and twice in the backward pass. With a causal mask a token sees (seq_len + 1) / 2 positions on
    average; PaLM counts all seq_len.

    It excludes norms, softmax, rotation and other elementwise work, the optimizer, recomputation (by activation
    checkpointing or inside attention), and the zeros that pad heads or positions for a kernel. Of the attention
    options, only the gate's matrix counts: not its product with the output, softcap, Scalable-Softmax or a sink.

    Args:
        config: Resolved sizes, including the vocabulary size.
        seq_len: Number of tokens in a sequence.
    """
    # 3 passes x 2 FLOPs x (seq_len + 1) / 2 positions x the width of all heads in both products
    attention = 3 * config.num_layers * config.num_heads * sum(_head_widths(config)) * (seq_len + 1)
    return 6 * num_matmul_parameters(config) + attention


def _attention_parameters(config: ModelConfig) -> int:
    """Returns the number of matrix weights in one attention layer."""
    gate = config.dim * config.num_heads * _head_widths(config)[1] if config.attention.gated else 0
    if config.attention.kind == "mla":
        sizes = latent_sizes(config)
        queries_from, query_down = config.dim, 0
        if sizes.q_latent_dim is not None:
            queries_from, query_down = sizes.q_latent_dim, config.dim * sizes.q_latent_dim
        query = query_down + queries_from * config.num_heads * sizes.query_key_dim
        down = config.dim * (sizes.kv_latent_dim + sizes.rope_dim)
        up = sizes.kv_latent_dim * config.num_heads * (sizes.nope_dim + sizes.value_dim)
        return query + down + up + config.num_heads * sizes.value_dim * config.dim + gate
    assert config.num_kv_heads is not None, "the configuration must be resolved"
    assert config.head_dim is not None, "the configuration must be resolved"
    return 2 * config.dim * (config.num_heads + config.num_kv_heads) * config.head_dim + gate


def _head_widths(config: ModelConfig) -> tuple[int, int]:
    """Returns the widths of a query/key head and of a value head."""
    if config.attention.kind == "mla":
        sizes = latent_sizes(config)
        return sizes.query_key_dim, sizes.value_dim
    assert config.head_dim is not None, "the configuration must be resolved"
    return config.head_dim, config.head_dim
