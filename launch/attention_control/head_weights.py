"""This rank's pieces of the query/key weights, head by head, at every ZeRO stage."""

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
    """This rank's pieces of the query/key weights, head by head.

    Args:
        layouts: where the heads lie, by kind.
        shards: this rank's pieces of all parameters; it may have none.
        device: where they lie.
        is_replicated: whether every rank holds whole weights (ZeRO stage 0).
    """

    def __init__(
        self, layouts: Mapping[Kind, HeadLayout], shards: Sequence[Shard], device: torch.device, is_replicated: bool
    ) -> None:
        self.layouts = layouts
        self.device = device
        self._is_replicated = is_replicated
        place = {name: (kind, layer) for kind, layout in layouts.items() for layer, name in enumerate(layout.names)}
        self._pieces = [(shard, *place[shard.name]) for shard in shards if shard.name in place]
        self._pieces_of: dict[int, list[tuple[Shard, Kind, int]]] = {}
        for shard, kind, layer in self._pieces:
            if kind not in LATENT_GAINS:
                self._pieces_of.setdefault(id(shard.flat), []).append((shard, kind, layer))
        self._old: dict[int, Tensor] = {}

    @property
    def num_layers(self) -> int:
        return len(next(iter(self.layouts.values())).names)

    @property
    def num_pieces(self) -> int:
        """Pieces of matrices on this rank."""
        return sum(map(len, self._pieces_of.values()))

    def norms(self) -> dict[Kind, Tensor]:
        """Norm of every head, (L, heads) in fp64, the same on all ranks: one all-reduce. Collective."""
        squares, tables = self.empty_tables()
        for shard, kind, layer in self._pieces:
            add_squared_norms(shard.master, shard.start, self.layouts[kind].numel, tables[kind][layer])
        return self.summed_norms(squares, tables)

    def empty_tables(self) -> tuple[Tensor, dict[Kind, Tensor]]:
        """Zeros for all heads in one piece, and the same by kind (L, heads)."""
        sizes = {kind: len(layout.names) * layout.num_heads for kind, layout in self.layouts.items()}
        squares = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=self.device)
        parts = squares.split(list(sizes.values()))
        return squares, {
            kind: part.view(-1, self.layouts[kind].num_heads) for kind, part in zip(sizes, parts, strict=True)
        }

    def summed_norms(self, squares: Tensor, tables: HeadTable) -> dict[Kind, Tensor]:
        """Norms over all ranks from this rank's squares. Collective."""
        if not self._is_replicated:
            dist.all_reduce(squares)
        return {kind: table.sqrt() for kind, table in tables.items()}

    def keep(self, flats: Sequence[Tensor]) -> None:
        """Copies the masters among `flats`, which the optimizer is about to change."""
        for flat in flats:
            if id(flat) in self._pieces_of:
                self._old[id(flat)] = flat.detach().clone().view(-1)

    def forget(self, flats: Sequence[Tensor]) -> None:
        """Drops the copies of `keep`."""
        for flat in flats:
            self._old.pop(id(flat), None)

    def scale_steps(self, flats: Sequence[Tensor], ratios: HeadTable) -> int:
        """Scales what has changed since `keep`; returns the number of pieces."""
        num_pieces = 0
        for flat, shard, kind, layer in self._kept_pieces(flats):
            old, ratio_H = shard.view(self._old[id(flat)]), ratios[kind][layer].to(torch.float32)
            scale_step(shard.master, old, shard.start, self.layouts[kind].numel, ratio_H)
            num_pieces += 1
        return num_pieces

    def add_squared_changes(self, flats: Sequence[Tensor], tables: HeadTable) -> None:
        """Adds the squared norm of what has changed since `keep` to `tables`."""
        for flat, shard, kind, layer in self._kept_pieces(flats):
            change = shard.master - shard.view(self._old[id(flat)])
            add_squared_norms(change, shard.start, self.layouts[kind].numel, tables[kind][layer])

    def _kept_pieces(self, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Shard, Kind, int]]:
        for flat in flats:
            if id(flat) in self._old:
                for piece in self._pieces_of[id(flat)]:
                    yield flat, *piece

    def scale(self, flats: Sequence[Tensor], factors: HeadTable) -> None:
        """Multiplies the heads of the kinds in `factors`."""
        for flat in flats:
            for shard, kind, layer in self._pieces_of.get(id(flat), ()):
                if kind in factors:
                    factor_H = factors[kind][layer].to(torch.float32)
                    scale_heads(shard.master, shard.start, self.layouts[kind].numel, factor_H)


class UpdateMeter:
    """How large one step of the query/key matrices is relative to them, per matrix of every layer."""

    def __init__(self, weights: HeadWeights) -> None:
        self._weights = weights
        self._squares, self._tables = weights.empty_tables()

    def add(self, flats: Sequence[Tensor]) -> None:
        """Takes the change of `flats` since `HeadWeights.keep`."""
        self._weights.add_squared_changes(flats, self._tables)

    def read(self) -> dict[Kind, tuple[list[float], list[float]]]:
        """Kind -> norms of the matrices after the step, and norms of their steps; one a layer each. Collective."""
        norms, steps = self._weights.norms(), self._weights.summed_norms(self._squares, self._tables)
        return {
            kind: (_whole(norms[kind]).tolist(), _whole(steps[kind]).tolist())
            for kind in norms
            if kind not in LATENT_GAINS
        }


def _whole(norms_LH: Tensor) -> Tensor:
    """Norms of matrices (L) from those of their heads."""
    return norms_LH.square().sum(dim=-1).sqrt()
