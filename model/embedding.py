"""The two layers that depend on the vocabulary: the token embedding and the output head.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cross_entropy import linear_cross_entropy
from model.parameters import Kind, ParameterSpec


class Embedding(nn.Embedding):
    """A table with one row per token id, undefined until `initialise` or a checkpoint sets it."""

    weight: nn.Parameter

    def __init__(self, vocab_size: int, dim: int, init_std: float) -> None:
        super().__init__(vocab_size, dim)
        self.init_std = init_std

    def reset_parameters(self) -> None:
        """Does nothing, so that construction draws no random numbers."""

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec(Kind.EMBEDDING, init_std=self.init_std)}


class OutputHead(nn.Module):
    """Computes the logits of the next token, or their cross-entropy.

    The loss is computed inside the module, so that hooks that gather a sharded weight around `forward`
    (ZeRO-3) work. A tied head holds the embedding's Parameter, whose role the embedding declares.
    """

    def __init__(self, vocab_size: int, dim: int, init_std: float, tied_weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.init_std = init_std
        self.is_tied = tied_weight is not None
        self.weight = nn.Parameter(torch.empty(vocab_size, dim)) if tied_weight is None else tied_weight

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return {} if self.is_tied else {"weight": ParameterSpec(Kind.HEAD, init_std=self.init_std)}

    def forward(
        self, hidden_BTD: Tensor, targets_BT: Tensor | None = None, z_loss_weight: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Returns the logits (B, T, V), or, given targets, the three sums of `linear_cross_entropy`."""
        if targets_BT is None:
            return F.linear(hidden_BTD, self.weight)
        return linear_cross_entropy(hidden_BTD.flatten(0, 1), self.weight, targets_BT.flatten(), z_loss_weight)
