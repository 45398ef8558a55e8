"""This rank's shards of the query/key weights, head by head, at every ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from launch.distributed.shards import Shard
from model.parameters import Kind
from model.stability.heads import add_squared_norms, scale_heads, scale_step
from model.stability.layers import HeadLayout
from model.stability.policies import LATENT_GAINS

HeadTable = Mapping[Kind, Tensor]  # (L, heads) by kind


class HeadWeights:
    """This rank's shards of the query/key weights, head by head.

    Args:
        layouts: The layout of the heads in each kind of parameter.
        shards: This rank's shards of all parameters; there may be none.
        device: The device of the shards.
        is_replicated: Whether every rank holds all weights (ZeRO stage 0).
    """

    def __init__(
        self, layouts: Mapping[Kind, HeadLayout], shards: Sequence[Shard], device: torch.device, is_replicated: bool
    ) -> None:
        self.layouts = layouts
        self.device = device
        self._is_replicated = is_replicated
        place = {name: (kind, layer) for kind, layout in layouts.items() for layer, name in enumerate(layout.names)}
        self._shards = [(shard, *place[shard.name]) for shard in shards if shard.name in place]
        self._shards_by_flat: dict[int, list[tuple[Shard, Kind, int]]] = {}
        for shard, kind, layer in self._shards:
            if kind not in LATENT_GAINS:
                self._shards_by_flat.setdefault(id(shard.flat), []).append((shard, kind, layer))
        self._copies: dict[int, Tensor] = {}

    @property
    def num_layers(self) -> int:
        return len(next(iter(self.layouts.values())).names)

    @property
    def num_shards(self) -> int:
        """The number of matrix shards on this rank."""
        return sum(map(len, self._shards_by_flat.values()))

    def norms(self) -> dict[Kind, Tensor]:
        """The norm of every head (L, heads), fp64, the same on all ranks. Collective: one all-reduce."""
        squares, tables = self.empty_tables()
        for shard, kind, layer in self._shards:
            add_squared_norms(shard.master, shard.start, self.layouts[kind].numel, tables[kind][layer])
        return self.summed_norms(squares, tables)

    def empty_tables(self) -> tuple[Tensor, dict[Kind, Tensor]]:
        """Returns one tensor of zeros for all heads, and views of it by kind (L, heads)."""
        sizes = {kind: len(layout.names) * layout.num_heads for kind, layout in self.layouts.items()}
        squares = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=self.device)
        parts = squares.split(list(sizes.values()))
        return squares, {
            kind: part.view(-1, self.layouts[kind].num_heads) for kind, part in zip(sizes, parts, strict=True)
        }

    def summed_norms(self, squares: Tensor, tables: HeadTable) -> dict[Kind, Tensor]:
        """Sums this rank's squares over all ranks and returns the norms. Collective."""
        if not self._is_replicated:
            dist.all_reduce(squares)
        return {kind: table.sqrt() for kind, table in tables.items()}

    def copy_masters(self, flats: Sequence[Tensor]) -> None:
        """Copies the query/key masters in `flats` before the optimizer updates them."""
        for flat in flats:
            if id(flat) in self._shards_by_flat:
                self._copies[id(flat)] = flat.detach().clone().view(-1)

    def drop_copies(self, flats: Sequence[Tensor]) -> None:
        """Drops the copies that `copy_masters` made."""
        for flat in flats:
            self._copies.pop(id(flat), None)

    def scale_steps(self, flats: Sequence[Tensor], ratios: HeadTable) -> int:
        """Scales the changes since `copy_masters`; returns the number of scaled shards."""
        num_shards = 0
        for flat, shard, kind, layer in self._copied_shards(flats):
            old, ratio_H = shard.view(self._copies[id(flat)]), ratios[kind][layer].to(torch.float32)
            scale_step(shard.master, old, shard.start, self.layouts[kind].numel, ratio_H)
            num_shards += 1
        return num_shards

    def add_squared_changes(self, flats: Sequence[Tensor], tables: HeadTable) -> None:
        """Adds the squared norms of the changes since `copy_masters` to `tables`."""
        for flat, shard, kind, layer in self._copied_shards(flats):
            change = shard.master - shard.view(self._copies[id(flat)])
            add_squared_norms(change, shard.start, self.layouts[kind].numel, tables[kind][layer])

    def _copied_shards(self, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Shard, Kind, int]]:
        for flat in flats:
            if id(flat) in self._copies:
                for shard, kind, layer in self._shards_by_flat[id(flat)]:
                    yield flat, shard, kind, layer

    def scale(self, flats: Sequence[Tensor], factors: HeadTable) -> None:
        """Multiplies the weights of the heads by `factors`, for the kinds in it."""
        for flat in flats:
            for shard, kind, layer in self._shards_by_flat.get(id(flat), ()):
                if kind in factors:
                    factor_H = factors[kind][layer].to(torch.float32)
                    scale_heads(shard.master, shard.start, self.layouts[kind].numel, factor_H)


class UpdateMeter:
    """Measures one step's change of each query/key matrix, in every layer."""

    def __init__(self, weights: HeadWeights) -> None:
        self._weights = weights
        self._squares, self._tables = weights.empty_tables()

    def add(self, flats: Sequence[Tensor]) -> None:
        """Adds the change of `flats` since `HeadWeights.copy_masters`."""
        self._weights.add_squared_changes(flats, self._tables)

    def read(self) -> dict[Kind, tuple[list[float], list[float]]]:
        """By kind: the norm of each layer's matrix after the step, and the norm of its change. Collective."""
        norms, steps = self._weights.norms(), self._weights.summed_norms(self._squares, self._tables)
        return {
            kind: (_whole(norms[kind]).tolist(), _whole(steps[kind]).tolist())
            for kind in norms
            if kind not in LATENT_GAINS
        }


def _whole(norms_LH: Tensor) -> Tensor:
    """The norms of whole matrices (L) from those of their heads."""
    return norms_LH.square().sum(dim=-1).sqrt()
