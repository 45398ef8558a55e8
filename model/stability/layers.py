"""Which parameters of which layer set the attention logits, as the attention modules declare it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from model.parameters import Kind


@runtime_checkable
class DeclaresQueryKeyWeights(Protocol):
    """An attention module."""

    def query_key_weights(self) -> Mapping[Kind, Tensor]:
        """The matrices behind queries and keys, and the gains of latent norms, each kind once."""
        ...


@dataclass(frozen=True)
class HeadLayout:
    """Where one kind's matrices lie: the same in every layer.

    Attributes:
        names: full parameter name of each layer's matrix, in the order of the layers.
        num_heads: heads along its rows; 1 when it is not split by head.
        numel: numbers of one head.
    """

    names: tuple[str, ...]
    num_heads: int
    numel: int


def collect_layouts(
    model: nn.Module, heads: Mapping[str, int | None], numel: Mapping[str, int]
) -> dict[Kind, HeadLayout]:
    """The layout of every kind of query/key weight of a model whose attention layers are alike.

    Args:
        heads: number of heads of every parameter, or None, by full name.
        numel: numbers of every parameter (ZeRO-3 hides them from the model).

    Raises:
        ValueError: no module of the model declares query/key weights.
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
