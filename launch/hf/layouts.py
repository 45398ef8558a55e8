"""Maps the tensors of public layouts to the model's parameters: one table for both directions.

A public tensor holds one or more of the model's matrices, interleaved by head:

    rows of head 0 of the first matrix, rows of head 0 of the second, …, rows of head 1 of the first, …

In some layouts the two rows of a rotary pair are adjacent in a head (i, i + 1); in this model they are half a head
apart (i, i + R/2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import ModelConfig
from model.gpt import GPT

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """A parameter of the model within a public tensor.

    Attributes:
        interleaved: Whether rotary pairs are adjacent in the public tensor.
    """

    name: str
    interleaved: bool = False


@dataclass(frozen=True)
class Rule:
    """A public tensor and the parameters in it.

    Attributes:
        num_heads: The number of heads into which the rows of all parts are split.
    """

    name: str
    parts: tuple[Part, ...]
    num_heads: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the public tensor equals one parameter."""
        return len(self.parts) == 1 and not self.parts[0].interleaved

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The shape of the public tensor, from those of the parameters."""
        own = [shapes[part.name] for part in self.parts]
        return (sum(shape[0] for shape in own), *own[0][1:])

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the public tensor made from the parts."""
        heads = [
            _interleave(_by_head(tensor, self.num_heads)) if part.interleaved else _by_head(tensor, self.num_heads)
            for part, tensor in zip(self.parts, tensors, strict=True)
        ]
        return torch.cat(heads, dim=1).flatten(0, 1)

    def unpack(self, tensor: Tensor, shapes: Shapes) -> dict[str, Tensor]:
        """Returns the parts of the public tensor, by name."""
        num_rows = [shapes[part.name][0] // self.num_heads for part in self.parts]
        heads = _by_head(tensor, self.num_heads).split(num_rows, dim=1)
        return {
            part.name: (_deinterleave(rows) if part.interleaved else rows).flatten(0, 1)
            for part, rows in zip(self.parts, heads, strict=True)
        }


def parameter_shapes(model: ModelConfig) -> Shapes:
    """The shape of every parameter by name, computed without allocating any."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in GPT(model).named_parameters()}


def rules(architecture: str, model: ModelConfig, is_rope_interleaved: bool = True) -> list[Rule]:
    """Returns the rules for all tensors of a layout.

    Args:
        architecture: "LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "SteadyheadForCausalLM" (the
            model's own names), or "gguf" (llama.cpp's Llama).
        is_rope_interleaved: Whether rotary pairs are adjacent in DeepSeek's matrices (`rope_interleave`).
    """
    names = list(parameter_shapes(model))
    if architecture == "SteadyheadForCausalLM":
        return [Rule(name, (Part(name),)) for name in names]
    if architecture == "gguf":
        return [_gguf_rule(name, model) for name in names]
    if architecture == "DeepseekV3ForCausalLM":
        latent = [name for name in names if ".attention." in name]
        plain = [Rule(_translate(name, _HUGGING_FACE), (Part(name),)) for name in names if name not in latent]
        layers = range(model.num_layers)
        return plain + [rule for layer in layers for rule in _latent_rules(layer, model, is_rope_interleaved)]
    return [Rule(_translate(name, _HUGGING_FACE), (Part(name),)) for name in names]


_HUGGING_FACE = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_GGUF = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "blocks": "blk",
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
}


def _translate(name: str, names: Mapping[str, str]) -> str:
    """`blocks.3.attention.query.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("blocks."):
        return f"{names[stem]}.weight"
    _, layer, module = stem.split(".", 2)
    return f"{names['blocks']}.{layer}.{names[module]}.weight"


def _gguf_rule(name: str, model: ModelConfig) -> Rule:
    public = _translate(name, _GGUF)
    if name.endswith(".attention.query.weight"):
        return Rule(public, (Part(name, interleaved=True),), model.num_heads)
    if name.endswith(".attention.key.weight"):
        return Rule(public, (Part(name, interleaved=True),), model.num_kv_heads or model.num_heads)
    return Rule(public, (Part(name),))


def _latent_rules(layer: int, model: ModelConfig, interleaved: bool) -> list[Rule]:
    """The attention of one DeepSeek-V3 layer."""

    def rule(public: str, *names: str, num_heads: int = 1) -> Rule:
        own = [f"blocks.{layer}.attention.{name}.weight" for name in names]
        parts = tuple(Part(name, interleaved and name.endswith("_rope.weight")) for name in own)
        return Rule(f"model.layers.{layer}.self_attn.{public}.weight", parts, num_heads)

    if model.attention.mla.q_latent_dim is None:
        query = [rule("q_proj", "query_up", "query_rope", num_heads=model.num_heads)]
    else:
        query = [
            rule("q_a_proj", "query_down"),
            rule("q_a_layernorm", "query_latent_norm"),
            rule("q_b_proj", "query_up", "query_rope", num_heads=model.num_heads),
        ]
    return [
        *query,
        rule("kv_a_proj_with_mqa", "kv_down", "key_rope"),
        rule("kv_a_layernorm", "kv_latent_norm"),
        rule("kv_b_proj", "key_up", "value_up", num_heads=model.num_heads),
        rule("o_proj", "output"),
    ]


def _by_head(tensor: Tensor, num_heads: int) -> Tensor:
    """(heads, rows of a head, …)."""
    return tensor.unflatten(0, (num_heads, -1))


def _interleave(heads: Tensor) -> Tensor:
    """Makes rows that are half a head apart adjacent."""
    return heads.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _deinterleave(heads: Tensor) -> Tensor:
    """Undoes `_interleave`."""
    return heads.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
