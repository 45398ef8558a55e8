"""Converts a model's configuration to config.json, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from configs.errors import ConfigError
from configs.schema import AttentionConfig, MlaConfig, ModelConfig, resolve_model
from launch.hf.config_keys import unknown_keys

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

_NEEDED_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
_NEEDED_KEYS_BY_TYPE = {
    "deepseek_v3": ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "steadyhead": ("attention",),
}
# The only value of each key that this model implements.
_ONLY_VALUES: _Json = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# The module in a folder that is known to implement the architecture: DeepSeek's, and Steadyhead's.
_KNOWN_CODE = {"deepseek_v3": "modeling_deepseek", "steadyhead": "modeling_steadyhead"}


def choose_architecture(model: ModelConfig) -> str:
    """The public architecture that computes the same as the model, or `OWN` if there is none."""
    attention = model.attention
    if attention.softcap is not None or attention.ssmax or attention.sink or attention.gated:
        return OWN
    if attention.kind == "mla":
        return DEEPSEEK if attention.mla.latent_norm and not attention.qk_norm else OWN
    if attention.qk_norm:
        return QWEN3
    # `transformers` rejects a Llama whose dim is not divisible by its heads, although it has head_dim.
    return LLAMA if model.dim % model.num_heads == 0 else OWN


def to_hf_config(model: ModelConfig, dtype: str, eod_id: int | None) -> _Json:
    """Returns the content of config.json.

    Args:
        model: The resolved configuration, with a vocabulary size.
        dtype: The type of the weights, `bfloat16` or `float32`.
        eod_id: The end-of-document id; None if unknown.
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
        # All layers are dense: no mixture of experts, no multi-token prediction.
        "first_k_dense_replace": model.num_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }


class Imported(NamedTuple):
    """The content of a config.json.

    Attributes:
        architecture: One of MODEL_TYPES' values.
        model: The resolved configuration, with a vocabulary size.
        eod_id: The first end-of-sequence id; None if there is none.
        is_rope_interleaved: Whether the two rows of each rotary pair are adjacent in DeepSeek's matrices.
    """

    architecture: str
    model: ModelConfig
    eod_id: int | None
    is_rope_interleaved: bool


def from_hf_config(config: _Json, where: str) -> Imported:
    """Reads the content of config.json.

    Args:
        where: The file's name for messages.

    Raises:
        ConfigError: With a line for each unsupported setting, and each missing or invalid value.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ConfigError([f"{where}: model_type {model_type!r} is not supported; expected {', '.join(MODEL_TYPES)}"])
    problems: list[str] = []
    missing = [f"{where}: {key} is missing" for key in _missing_keys(config)]
    try:
        problems += [f"{where}: {problem}" for problem in _unsupported(config)]
        model = None if missing else _model(config)
    except ValidationError as error:
        wrong = [
            f"{where}: {'.'.join(map(str, item['loc']))}: {item['input']!r}: {item['msg']}" for item in error.errors()
        ]
        raise ConfigError([*problems, *wrong]) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError([*problems, f"{where}: {error}"]) from None
    if problems or model is None:
        raise ConfigError([*problems, *missing])
    eos = config.get("eos_token_id")
    first = eos[0] if isinstance(eos, list) and eos else eos
    eod_id = first if type(first) is int and 0 <= first < (model.vocab_size or 0) else None
    return Imported(MODEL_TYPES[model_type], model, eod_id, bool(config.get("rope_interleave", True)))


def _missing_keys(config: _Json) -> Iterator[str]:
    """Required sizes that are absent or null. Defaults are not applied, since they differ between the formats."""
    for key in (*_NEEDED_KEYS, *_NEEDED_KEYS_BY_TYPE.get(config["model_type"], ())):
        if config.get(key) is None:
            yield key
    if config["model_type"] == "deepseek_v3" and "q_lora_rank" not in config:
        yield "q_lora_rank"  # null is valid: no query compression


def _unsupported(config: _Json) -> Iterator[str]:
    """Settings that change, or might change, what the network computes, and that this model does not support."""
    for key, value in _ONLY_VALUES.items():
        if config.get(key, value) != value:
            yield f"{key} {config[key]!r} is not supported; only {value!r} is"
    yield from _unsupported_code(config)
    yield from _unsupported_rope(config)
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is None:
        yield f"sliding_window {config['sliding_window']} is not supported"
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        yield f"layer_types {', '.join(kinds)}: only full_attention is supported"
    if config.get("quantization_config"):
        yield "quantised weights (quantization_config) are not supported"
    if config["model_type"] == "deepseek_v3":
        yield from _unsupported_deepseek(config)
    for key in unknown_keys(config):
        yield f"{key} {config[key]!r} is unknown and might change what the model computes; delete it if it does not"


def _unsupported_deepseek(config: _Json) -> Iterator[str]:
    """Unsupported settings of DeepSeek: layers that are not dense, and heads that share keys."""
    num_dense, num_layers = config.get("first_k_dense_replace", 3), config.get("num_hidden_layers")
    is_dense = type(num_dense) is int and not (type(num_layers) is int and num_dense < num_layers)
    if not is_dense and config.get("n_routed_experts", 256) is not None:
        yield f"mixture of experts is not supported: first_k_dense_replace is {num_dense!r} of {num_layers} layers"
    num_heads, num_kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(num_heads) is int and num_kv_heads not in (None, num_heads):
        yield f"num_key_value_heads {num_kv_heads!r} is not supported; expected num_attention_heads, {num_heads}"
    if config.get("rope_interleave", True) not in (True, False, None):
        yield f"rope_interleave {config['rope_interleave']!r} is not supported; expected true or false"


def _unsupported_code(config: _Json) -> Iterator[str]:
    """An architecture that does not match the model type, or unknown custom code."""
    expected = MODEL_TYPES[config["model_type"]]
    architectures = config.get("architectures")
    if architectures and expected not in architectures:
        yield f"architectures {architectures!r} is not supported; expected {expected}"
    for auto_class, name in (config.get("auto_map") or {}).items():
        module = str(name).split("--")[-1].split(".")[0]
        if auto_class.startswith("AutoModel") and module != _KNOWN_CODE.get(config["model_type"]):
            yield f"auto_map.{auto_class} {name!r}: a model with custom code is not supported"


def _unsupported_rope(config: _Json) -> Iterator[str]:
    """Rotary positions other than angles of position * rope_theta^(-2i / width) over the whole width."""
    bases = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    partial = {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
    for section in ("rope_parameters", "rope_scaling"):
        rope = config.get(section) or {}
        if not isinstance(rope, dict):
            yield f"{section} {rope!r} is not supported; expected an object"
            continue
        scalings = [rope[key] for key in ("rope_type", "type") if rope.get(key, "default") != "default"]
        if scalings:
            yield f"rope scaling {scalings[0]!r} is not supported"
            continue
        for key, value in rope.items():
            if key not in _ROPE_KEYS and value is not None:
                yield f"{section}.{key} {value!r} is not supported"
        if rope.get("rope_theta") is not None:
            bases[f"{section}.rope_theta"] = rope["rope_theta"]
        partial[f"{section}.partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    for key, value in partial.items():
        if value not in (None, 1.0):
            yield f"{key} {value!r} is not supported; only 1.0 is"
    if any(value != next(iter(bases.values())) for value in bases.values()):
        yield "; ".join(f"{key} is {value!r}" for key, value in bases.items()) + ": the values conflict"


def _model(config: _Json) -> ModelConfig:
    model = ModelConfig(
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=_head_dim(config),
        ffn_dim=config["intermediate_size"],
        max_seq_len=config["max_position_embeddings"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        rope_theta=_rope_theta(config),
        norm_eps=config.get("rms_norm_eps", _DEFAULT_NORM_EPS),
        init_std=config.get("initializer_range") or ModelConfig.model_fields["init_std"].default,
        attention=_attention(config),
    )
    return resolve_model(model)


def _rope_theta(config: _Json) -> float:
    for section in (config.get("rope_scaling"), config.get("rope_parameters"), config):
        if isinstance(section, dict) and section.get("rope_theta") is not None:
            theta: float = section["rope_theta"]
            return theta
    return _DEFAULT_ROPE_THETA


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
