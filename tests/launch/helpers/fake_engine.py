"""An engine without DeepSpeed that holds shards of made-up parameters: what saving and restoring need of an engine."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from launch.distributed.shards import Shard

SHAPES = {"first": (3, 5), "second": (4,)}


class FakeEngine:
    """A rank that owns an even part of all parameters, which lie one behind the other in one flat tensor."""

    def __init__(self, rank: int, world_size: int, is_replicated: bool = False) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device("cpu")
        total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
        begin, end = (0, total) if is_replicated else (total * rank // world_size, total * (rank + 1) // world_size)
        self.flat = torch.zeros(end - begin)
        self._shards = []
        position = 0
        for name, shape in SHAPES.items():
            numel = torch.Size(shape).numel()
            start, stop = max(begin - position, 0), min(end - position, numel)
            if start < stop:
                offset = position + start - begin
                self._shards.append(Shard(name, shape, start, stop, self.flat, offset, is_replicated))
            position += numel
        self.base_optimizer = SimpleNamespace(state=defaultdict(dict))
        self.num_published = 0
        self.policy: tuple[dict[str, Any], dict[str, Tensor]] = ({}, {})
        self._begin = begin

    def fill(self) -> FakeEngine:
        """Gives every element of the masters and of two moments a value that tells its place."""
        places = torch.arange(self._begin, self._begin + len(self.flat), dtype=torch.float32)
        self.flat.copy_(places)
        self.base_optimizer.state[self.flat] = {
            "exp_avg": places + 100,
            "exp_avg_sq": places + 200,
            "step": torch.tensor(7.0),
        }
        self.policy = ({"progress": 3}, {"norms": torch.tensor([1.0, 2.0])})
        return self

    def shards(self) -> list[Shard]:
        return self._shards

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return SHAPES

    def policy_tensors(self) -> dict[str, Tensor]:
        return self.policy[1]

    def load_policy(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.policy = (state, tensors)

    def sync_model_weights(self) -> None:
        self.num_published += 1
