"""How the tensors of public layouts correspond to the model's parameters: one table for both directions.

A public tensor holds one or more of our matrices, interleaved by head:

    rows of head 0 of the first matrix, rows of head 0 of the second, …, rows of head 1 of the first, …

and in some layouts the rotated rows of a head come as neighbouring pairs (i, i + 1), where ours are half a head apart
(i, i + R/2).
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
    """One of our parameters within a public tensor.

    Attributes:
        paired: whether the rows of each head come as neighbouring pairs there.
    """

    name: str
    paired: bool = False


@dataclass(frozen=True)
class Rule:
    """A public tensor and the parameters in it.

    Attributes:
        num_heads: heads in which the rows of all parts are cut.
    """

    name: str
    parts: tuple[Part, ...]
    num_heads: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the public tensor is one of ours as it is."""
        return len(self.parts) == 1 and not self.parts[0].paired

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Shape of the public tensor, from those of our parameters."""
        own = [shapes[part.name] for part in self.parts]
        return (sum(shape[0] for shape in own), *own[0][1:])

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The public tensor from the parts."""
        heads = [
            _pair(_by_head(tensor, self.num_heads)) if part.paired else _by_head(tensor, self.num_heads)
            for part, tensor in zip(self.parts, tensors, strict=True)
        ]
        return torch.cat(heads, dim=1).flatten(0, 1)

    def unpack(self, tensor: Tensor, shapes: Shapes) -> dict[str, Tensor]:
        """The parts by name from the public tensor."""
        num_rows = [shapes[part.name][0] // self.num_heads for part in self.parts]
        heads = _by_head(tensor, self.num_heads).split(num_rows, dim=1)
        return {
            part.name: (_unpair(rows) if part.paired else rows).flatten(0, 1)
            for part, rows in zip(self.parts, heads, strict=True)
        }


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Name and shape of every parameter, without allocating any."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in GPT(model).named_parameters()}


def rules(architecture: str, model: ModelConfig, pairs_are_neighbours: bool = True) -> list[Rule]:
    """All tensors of a layout.

    Args:
        architecture: "LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "SteadyheadForCausalLM" (our own
            names), or "gguf" (llama.cpp's Llama).
        pairs_are_neighbours: how DeepSeek's rotated rows are stored (`rope_interleave`).
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
        return plain + [rule for layer in layers for rule in _latent_rules(layer, model, pairs_are_neighbours)]
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


def _translate(name: str, words: Mapping[str, str]) -> str:
    """`blocks.3.attention.query.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("blocks."):
        return f"{words[stem]}.weight"
    _, layer, module = stem.split(".", 2)
    return f"{words['blocks']}.{layer}.{words[module]}.weight"


def _gguf_rule(name: str, model: ModelConfig) -> Rule:
    public = _translate(name, _GGUF)
    if name.endswith(".attention.query.weight"):
        return Rule(public, (Part(name, paired=True),), model.num_heads)
    if name.endswith(".attention.key.weight"):
        return Rule(public, (Part(name, paired=True),), model.num_kv_heads or model.num_heads)
    return Rule(public, (Part(name),))


def _latent_rules(layer: int, model: ModelConfig, paired: bool) -> list[Rule]:
    """The attention of one DeepSeek-V3 layer."""

    def rule(public: str, *names: str, num_heads: int = 1) -> Rule:
        own = [f"blocks.{layer}.attention.{name}.weight" for name in names]
        parts = tuple(Part(name, paired and name.endswith("_rope.weight")) for name in own)
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


def _pair(heads: Tensor) -> Tensor:
    """Rows half a head apart become neighbours."""
    return heads.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _unpair(heads: Tensor) -> Tensor:
    """Undoes `_pair`."""
    return heads.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
