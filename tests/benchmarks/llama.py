"""Hugging Face's Llama with the shape of a Steadyhead model."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema import ModelConfig


def build_llama(config: ModelConfig) -> LlamaForCausalLM:
    """Returns the model with its own initial weights, on the CPU in fp32."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
