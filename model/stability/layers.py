"""The parameters that determine each layer's attention logits, as declared by the attention modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from model.parameters import Kind


@runtime_checkable
class DeclaresQueryKeyWeights(Protocol):
    """An attention module that declares its query/key weights."""

    def query_key_weights(self) -> Mapping[Kind, Tensor]:
        """Returns the matrices that produce queries and keys, and the gains of latent norms, by kind."""
        ...


@dataclass(frozen=True)
class HeadLayout:
    """The names and head layout of one kind of matrix, the same in every layer.

    Attributes:
        names: Full parameter name of each layer's matrix, in the order of the layers.
        num_heads: Number of heads along the rows; 1 if the matrix is not split by head.
        numel: Number of elements in one head.
    """

    names: tuple[str, ...]
    num_heads: int
    numel: int


def collect_layouts(
    model: nn.Module, heads: Mapping[str, int | None], numel: Mapping[str, int]
) -> dict[Kind, HeadLayout]:
    """Returns the layout of every kind of query/key weight of a model whose attention layers are identical.

    Args:
        heads: Number of heads of every parameter, or None, by full name.
        numel: Number of elements of every parameter (under ZeRO-3 the model's own parameters are empty).

    Raises:
        ValueError: No module of the model declares query/key weights.
    """
    names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    names: dict[Kind, list[str]] = {}
    for module in model.modules():
        if isinstance(module, DeclaresQueryKeyWeights):
            for kind, parameter in module.query_key_weights().items():
                names.setdefault(kind, []).append(names_by_id[id(parameter)])
    if not names:
        raise ValueError("the model has no attention layer that declares query/key weights")
    layouts = {}
    for kind, members in names.items():
        num_heads = heads[members[0]] or 1
        layouts[kind] = HeadLayout(tuple(members), num_heads, numel[members[0]] // num_heads)
    return layouts
