"""The role, head layout and initial values that a module declares for each of its parameters.

A module that owns parameters has a method `parameter_specs()`, which maps the local names of its own
parameters (not those of its children) to a `ParameterSpec`. Optimizer groups, initialisation and query/key
control read the specs; no code infers a role from a name.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn


class Kind(enum.Enum):
    """A parameter's role in the network."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ATTENTION_OUTPUT = "attention_output"
    FFN_IN = "ffn_in"
    FFN_OUT = "ffn_out"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM_GAIN = "norm_gain"
    QK_NORM_GAIN = "qk_norm_gain"
    # Multi-head latent attention: W_dq, W_uq, W_qr, W_dkv, W_uk, W_kr, and the gains of the two latent norms.
    QUERY_DOWN = "query_down"
    QUERY_UP = "query_up"
    QUERY_ROPE = "query_rope"
    KV_DOWN = "kv_down"
    KEY_UP = "key_up"
    KEY_ROPE = "key_rope"
    QUERY_LATENT_GAIN = "query_latent_gain"
    KV_LATENT_GAIN = "kv_latent_gain"
    # Attention options: the per-head query scale of Scalable-Softmax, the per-head sink logit, and the gate's W_g.
    SOFTMAX_SCALE = "softmax_scale"
    ATTENTION_SINK = "attention_sink"
    ATTENTION_GATE = "attention_gate"


GAIN_KINDS = frozenset({Kind.NORM_GAIN, Kind.QK_NORM_GAIN, Kind.QUERY_LATENT_GAIN, Kind.KV_LATENT_GAIN})
LATENT_KINDS = frozenset({Kind.QUERY_DOWN, Kind.QUERY_UP, Kind.QUERY_ROPE, Kind.KV_DOWN, Kind.KEY_UP, Kind.KEY_ROPE})
QUERY_KEY_KINDS = frozenset({Kind.QUERY, Kind.KEY, Kind.SOFTMAX_SCALE}) | LATENT_KINDS | (GAIN_KINDS - {Kind.NORM_GAIN})
UNDECAYED_KINDS = GAIN_KINDS | {Kind.EMBEDDING, Kind.SOFTMAX_SCALE, Kind.ATTENTION_SINK}


@dataclass(frozen=True)
class ParameterSpec:
    """The role of one parameter.

    Attributes:
        kind: The parameter's role.
        num_heads: Number of heads along the rows (query, key, value, their up-projections and the gate), the columns
            (attention output) or the elements (one per head); None: not split by head.
        head_dim: Width of one head; head h starts at row (or column) h * head_dim.
        init_std: Standard deviation of the normal initial values; None: all are init_value.
        init_value: The initial value of parameters without init_std, 1 for gains.
    """

    kind: Kind
    num_heads: int | None = None
    head_dim: int | None = None
    init_std: float | None = None
    init_value: float = 1.0

    @property
    def is_query_key(self) -> bool:
        """Whether the parameter determines the magnitude of the attention logits."""
        return self.kind in QUERY_KEY_KINDS

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies, as it does to all matrices except embeddings.

        An untied output head is an ordinary matrix and decays. A tied head is the embedding, so it does not.
        This follows OLMo 2 (arXiv 2501.00656): decay makes embeddings small, which makes the gradients that reach
        them through the first norm large.
        """
        return self.kind not in UNDECAYED_KINDS


@runtime_checkable
class DeclaresParameters(Protocol):
    """A module that owns parameters."""

    def parameter_specs(self) -> dict[str, ParameterSpec]: ...


def residual_init_std(init_std: float, num_layers: int) -> float:
    """Returns the initial standard deviation of the two matrices per block that feed the residual stream (GPT-2)."""
    return init_std / math.sqrt(2 * num_layers)


def collect_specs(model: nn.Module) -> dict[str, ParameterSpec]:
    """Returns the spec of every parameter by its full name, in the order of `model.named_parameters()`.

    A tied parameter appears once, under its first name; only one of its modules declares it.

    Raises:
        ValueError: A parameter is undeclared, declared twice, or declared but absent; the message names it.
    """
    spec_by_id: dict[int, ParameterSpec] = {}
    for prefix, module in model.named_modules():
        declared = module.parameter_specs() if isinstance(module, DeclaresParameters) else {}
        parameters = dict(module.named_parameters(recurse=False))
        for local_name, spec in declared.items():
            full_name = f"{prefix}.{local_name}" if prefix else local_name
            if local_name not in parameters:
                raise ValueError(f"{full_name}: declared by {type(module).__name__}, which has no such parameter")
            if id(parameters[local_name]) in spec_by_id:
                raise ValueError(f"{full_name}: declared more than once")
            spec_by_id[id(parameters[local_name])] = spec

    named_parameters = list(model.named_parameters())
    undeclared = [name for name, parameter in named_parameters if id(parameter) not in spec_by_id]
    if undeclared:
        raise ValueError(f"no module declares a role for {', '.join(undeclared)}")
    return {name: spec_by_id[id(parameter)] for name, parameter in named_parameters}
