"""Attention variants by the name that `model.attention.kind` gives them."""

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
    """What a block and a model use of an attention layer.

    Shapes: B batch, T time, D model width, H query heads, G key/value heads, K query/key width, V value width.

    Attributes:
        rotary_dim: width of the rotary table that the layer takes.
        softcap: cap of the logits, or None.
        sink: the logit of every query head's sink (H), or None.
    """

    rotary_dim: int
    softcap: float | None
    sink: nn.Parameter | None

    def query_key_weights(self) -> dict[Kind, Tensor]:
        """The matrices behind queries and keys, and the gains of latent norms."""

    def new_cache(self, batch_size: int, num_positions: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """An empty cache of this layer."""

    def project(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        first_position: int = 0,
        positions_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, K), keys (B, G, T, K) and values (B, G, T, V), with norms and rotation applied.

        With Scalable-Softmax the queries are scaled for positions from `first_position` on, or for those given, so that
        q·k / sqrt(K) are the logits as the softmax or its cap gets them.
        """

    def __call__(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attends to these and earlier positions, those in the cache too. Input and output are (B, T, D).

        With documents, for whose positions `rotary` then is, it attends within them. They do not go with a cache.
        """


ATTENTION: dict[str, Callable[[ModelConfig], Attention]] = {
    "mha": MultiHeadAttention,
    "mla": MultiHeadLatentAttention,
}
