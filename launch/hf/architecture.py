"""`config.json` from a model's configuration, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from configs.errors import ConfigError
from configs.schema import AttentionConfig, MlaConfig, ModelConfig, resolve_model

LLAMA = "LlamaForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
DEEPSEEK = "DeepseekV3ForCausalLM"
OWN = "SteadyheadForCausalLM"
MODEL_TYPES = {"llama": LLAMA, "qwen3": QWEN3, "deepseek_v3": DEEPSEEK, "steadyhead": OWN}

_Json = dict[str, Any]
# Defaults of `transformers` for keys that a config.json may leave out.
_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_QWEN3_HEAD_DIM = 128


def choose_architecture(model: ModelConfig) -> str:
    """The public architecture that computes the same as the model, or our own where there is none."""
    attention = model.attention
    if attention.softcap is not None or attention.ssmax or attention.sink or attention.gated:
        return OWN
    if attention.kind == "mla":
        return DEEPSEEK if attention.mla.latent_norm and not attention.qk_norm else OWN
    if attention.qk_norm:
        return QWEN3
    # `transformers` refuses such a Llama although it has a head_dim.
    return LLAMA if model.dim % model.num_heads == 0 else OWN


def to_hf_config(model: ModelConfig, dtype: str, eod_id: int | None) -> _Json:
    """The content of config.json.

    Args:
        model: resolved, with a vocabulary size.
        dtype: of the weights, `bfloat16` or `float32`.
        eod_id: end-of-document id; None if unknown.
    """
    architecture = choose_architecture(model)
    model_type = next(name for name, value in MODEL_TYPES.items() if value == architecture)
    config: _Json = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": eod_id,
        "eos_token_id": eod_id,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,  # for `transformers` before 5
    }
    if architecture == DEEPSEEK:
        return config | _deepseek_keys(model)
    config["head_dim"] = model.head_dim
    if architecture == LLAMA:
        config["mlp_bias"] = False
    if architecture == OWN:
        names = {"AutoConfig": "SteadyheadConfig", "AutoModelForCausalLM": OWN}
        config["auto_map"] = {auto: f"modeling_steadyhead.{name}" for auto, name in names.items()}
        config["attention"] = model.attention.model_dump(mode="json")
    return config


def _deepseek_keys(model: ModelConfig) -> _Json:
    mla = model.attention.mla
    return {
        "q_lora_rank": mla.q_latent_dim,
        "kv_lora_rank": mla.kv_latent_dim,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "rope_interleave": True,
        # All layers are dense: no mixture of experts, no layers for several tokens at once.
        "first_k_dense_replace": model.num_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }


class Imported(NamedTuple):
    """What a config.json says.

    Attributes:
        architecture: one of MODEL_TYPES' values.
        model: resolved, with a vocabulary size.
        eod_id: the first end-of-sequence id; None if there is none.
        pairs_are_neighbours: how DeepSeek's rotated rows are stored.
    """

    architecture: str
    model: ModelConfig
    eod_id: int | None
    pairs_are_neighbours: bool


def from_hf_config(config: _Json, where: str) -> Imported:
    """The model's configuration from the content of config.json.

    Args:
        where: the file, for messages.

    Raises:
        ConfigError: a line for everything that this program does not compute, and for missing or wrong values.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError([f"{where}: model_type {model_type!r} is not supported; expected {', '.join(MODEL_TYPES)}"])
    problems: list[str] = []
    try:
        problems += [f"{where}: {problem}" for problem in _unsupported(config)]
        model = _model(config)
    except ValidationError as error:
        wrong = [
            f"{where}: {'.'.join(map(str, item['loc']))}: {item['input']!r}: {item['msg']}" for item in error.errors()
        ]
        raise ConfigError([*problems, *wrong]) from None
    except KeyError as error:
        raise ConfigError([*problems, f"{where}: {error.args[0]} is missing"]) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError([*problems, f"{where}: {error}"]) from None
    if problems:
        raise ConfigError(problems)
    eos = config.get("eos_token_id")
    first = eos[0] if isinstance(eos, list) and eos else eos
    eod_id = first if isinstance(first, int) and 0 <= first < (model.vocab_size or 0) else None
    return Imported(MODEL_TYPES[model_type], model, eod_id, bool(config.get("rope_interleave", True)))


def _unsupported(config: _Json) -> Iterator[str]:
    """Settings that change what the network computes and that the model has no counterpart of."""
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    for key, value in wanted.items():
        if config.get(key, value) != value:
            yield f"{key} {config[key]!r} is not supported; only {value!r} is"
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        yield f"rope scaling {rope_type!r} is not supported"
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        yield f"partial_rotary_factor {partial} is not supported; only 1.0 is"
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is None:
        yield f"sliding_window {config['sliding_window']} is not supported"
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        yield f"layer_types {', '.join(kinds)}: only full_attention is supported"
    if config.get("quantization_config"):
        yield "quantised weights (quantization_config) are not supported"
    if config["model_type"] == "deepseek_v3":
        num_dense, num_layers = config.get("first_k_dense_replace", 3), config.get("num_hidden_layers", 61)
        if num_dense < num_layers and config.get("n_routed_experts", 256) is not None:
            yield f"mixture of experts is not supported: first_k_dense_replace is {num_dense} of {num_layers} layers"


def _model(config: _Json) -> ModelConfig:
    rope = config.get("rope_parameters") or {}
    dim, num_heads = config["hidden_size"], config["num_attention_heads"]
    model = ModelConfig(
        vocab_size=config["vocab_size"],
        dim=dim,
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=_head_dim(config),
        ffn_dim=config["intermediate_size"],
        max_seq_len=config["max_position_embeddings"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA,
        norm_eps=config.get("rms_norm_eps", _DEFAULT_NORM_EPS),
        init_std=config.get("initializer_range") or ModelConfig.model_fields["init_std"].default,
        attention=_attention(config),
    )
    return resolve_model(model)


def _head_dim(config: _Json) -> int | None:
    if config["model_type"] == "deepseek_v3":
        return None
    if config["model_type"] == "qwen3":
        return config.get("head_dim", _DEFAULT_QWEN3_HEAD_DIM)
    return config.get("head_dim")


def _attention(config: _Json) -> AttentionConfig:
    if config["model_type"] == "steadyhead":
        return AttentionConfig.model_validate(config["attention"])
    if config["model_type"] == "deepseek_v3":
        mla = MlaConfig(
            q_latent_dim=config["q_lora_rank"],
            kv_latent_dim=config["kv_lora_rank"],
            nope_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
        )
        return AttentionConfig(kind="mla", mla=mla)
    return AttentionConfig(qk_norm=config["model_type"] == "qwen3")
