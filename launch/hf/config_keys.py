"""The known keys of a config.json. Any other key might change what the model computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def unknown_keys(config: dict[str, Any]) -> Iterator[str]:
    """Yields the non-empty keys that are neither read nor known not to affect the logits.

    Args:
        config: The content of config.json; its `model_type` is one that `launch.hf.architecture` reads.
    """
    model_type = config["model_type"]
    known = _split(_READ + _OTHER + _READ_BY_TYPE.get(model_type, "") + _OTHER_BY_TYPE.get(model_type, ""))
    for key, value in config.items():
        if key not in known and value not in (None, {}, []):
            yield key


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys that `launch.hf.architecture` reads.
_READ = """
    model_type architectures auto_map quantization_config eos_token_id
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings tie_word_embeddings rms_norm_eps initializer_range hidden_act attention_bias mlp_bias
    rope_theta rope_parameters rope_scaling partial_rotary_factor rope_interleaved
    use_sliding_window sliding_window layer_types is_encoder_decoder add_cross_attention
"""
_READ_BY_TYPE = {
    "deepseek_v3": """
        q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave first_k_dense_replace
        n_routed_experts
    """,
    "steadyhead": """
        attention
    """,
}
# Keys about training, generation, tokens and bookkeeping, and those with no effect without windows or experts.
_OTHER = """
    _name_or_path transformers_version transformers.js_config is_llama_config unsloth_fixed unsloth_version
    dtype torch_dtype use_bfloat16 torchscript attn_implementation _attn_implementation
    _attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled
    use_cache return_dict output_attentions output_hidden_states chunk_size_feed_forward pretraining_tp is_decoder
    attention_dropout hidden_dropout tie_encoder_decoder cross_attention_hidden_size max_window_layers
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix tokenizer_class
    bos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id max_sequence_length
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
_OTHER_BY_TYPE = {
    "deepseek_v3": """
        qk_head_dim moe_intermediate_size moe_layer_freq n_shared_experts num_experts_per_tok num_local_experts n_group
        topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor aux_loss_alpha seq_aux ep_size
        output_router_logits num_nextn_predict_layers num_mtp_layers
    """,
}
