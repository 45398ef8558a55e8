"""Preallocated key/value caches for decoding.

Shapes: B batch, T time, S positions in the cache, H heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of one attention layer."""

    def __init__(
        self,
        batch_size: int,
        num_positions: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (batch_size, num_heads, num_positions, head_dim)
        self.keys_BHSK = torch.empty(shape, dtype=dtype, device=device)
        self.values_BHSK = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes of one position of one sequence in this layer."""
        batch_size, _, num_positions, _ = self.keys_BHSK.shape
        return (self.keys_BHSK.nbytes + self.values_BHSK.nbytes) // (batch_size * num_positions)

    def append(self, keys_BHTK: Tensor, values_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """Stores T more positions and returns the keys and values of all positions so far."""
        start, self.length = self.length, self.length + keys_BHTK.shape[2]
        assert self.length <= self.keys_BHSK.shape[2], "the caller limits the context to the cache's size"
        self.keys_BHSK[:, :, start : self.length] = keys_BHTK
        self.values_BHSK[:, :, start : self.length] = values_BHTK
        return self.keys_BHSK[:, :, : self.length], self.values_BHSK[:, :, : self.length]


class Cache:
    """The caches of all layers of a model; `GPT.new_cache` makes one."""

    def __init__(self, layers: list[KeyValueCache], max_length: int) -> None:
        self.layers = layers
        self.max_length = max_length

    @property
    def length(self) -> int:
        """Number of positions in the cache."""
        return self.layers[0].length

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes of one position of one sequence in all layers."""
        return sum(layer.num_bytes_per_token for layer in self.layers)
