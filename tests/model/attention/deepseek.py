"""Hugging Face's DeepSeek-V3 with the sizes of a model with latent attention."""

from __future__ import annotations

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from configs.schema import ModelConfig


def build_deepseek(config: ModelConfig) -> DeepseekV3ForCausalLM:
    """Returns a DeepSeek-V3 model with dense layers only and its own initial weights, on the CPU in fp32."""
    mla = config.attention.mla
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            first_k_dense_replace=config.num_layers,
            num_mtp_layers=0,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            q_lora_rank=mla.q_latent_dim,
            kv_lora_rank=mla.kv_latent_dim,
            qk_nope_head_dim=mla.nope_dim,
            qk_rope_head_dim=mla.rope_dim,
            v_head_dim=mla.value_dim,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
