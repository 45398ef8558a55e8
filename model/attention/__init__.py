"""The attention layers, by the values of `model.attention.kind`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from configs.schema import ModelConfig
from model.attention.cache import LayerCache
from model.attention.documents import Documents
from model.attention.mha import MultiHeadAttention
from model.attention.mla import MultiHeadLatentAttention
from model.parameters import Kind


class Attention(Protocol):
    """The interface of an attention layer.

    Shapes: B batch, T time, D model width, H query heads, G key/value heads, K query/key width, V value width.

    Attributes:
        rotary_dim: Width of the rotary table that the layer expects.
        softcap: Cap on the logits, or None.
        sink: The logit of every query head's sink (H), or None.
    """

    rotary_dim: int
    softcap: float | None
    sink: nn.Parameter | None

    def query_key_weights(self) -> dict[Kind, Tensor]:
        """Returns the matrices that produce queries and keys, and the gains of latent norms."""

    def new_cache(self, batch_size: int, num_positions: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Returns an empty cache for this layer."""

    def project(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        first_position: int = 0,
        positions_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries (B, H, T, K), keys (B, G, T, K) and values (B, G, T, V), with norms and rotation applied.

        With Scalable-Softmax the queries are scaled for positions from `first_position` on, or for `positions_BT`, so
        that q·k / sqrt(K) are the logits that the softcap or softmax receives.
        """

    def __call__(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attends to these and all earlier positions, including cached ones. Input and output are (B, T, D).

        With documents, attention stays within them, and `rotary` is the table of their positions. Documents and a
        cache cannot be combined.
        """


ATTENTION: dict[str, Callable[[ModelConfig], Attention]] = {
    "mha": MultiHeadAttention,
    "mla": MultiHeadLatentAttention,
}
