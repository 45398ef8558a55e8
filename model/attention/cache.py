"""Preallocated caches for decoding.

Shapes: B batch, T new positions, S cached positions; each tensor has its own number of heads and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerCache:
    """The tensors that one attention layer stores for every position.

    Args:
        shapes: (heads, width) of each tensor, which is stored as (B, heads, S, width).
        batch_size: Number of sequences.
        num_positions: Number of positions to allocate.
        dtype, device: Those of the tensors.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        batch_size: int,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tensors = [
            torch.empty(batch_size, num_heads, num_positions, width, dtype=dtype, device=device)
            for num_heads, width in shapes
        ]
        self.length = 0

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes per position of one sequence in this layer."""
        batch_size, _, num_positions, _ = self.tensors[0].shape
        return sum(tensor.nbytes for tensor in self.tensors) // (batch_size * num_positions)

    def append(self, *new: Tensor) -> list[Tensor]:
        """Stores T more positions of every tensor, and returns all positions stored so far."""
        start, self.length = self.length, self.length + new[0].shape[2]
        assert self.length <= self.tensors[0].shape[2], "the caller limits the context to the cache's size"
        for tensor, values in zip(self.tensors, new, strict=True):
            tensor[:, :, start : self.length] = values
        return [tensor[:, :, : self.length] for tensor in self.tensors]


class Cache:
    """The caches of all layers of a model, created by `GPT.new_cache`."""

    def __init__(self, layers: list[LayerCache], max_length: int) -> None:
        self.layers = layers
        self.max_length = max_length

    @property
    def length(self) -> int:
        """Number of positions in the cache."""
        return self.layers[0].length

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes per position of one sequence in all layers."""
        return sum(layer.num_bytes_per_token for layer in self.layers)
