"""Applies a per-head policy to the optimizer's steps, at every ZeRO stage.

A learning rate belongs to a group, so the group has alpha times the base rate, and the per-head ratio is applied to the
step itself: the local fp32 masters are kept before the optimizer's step, and what it changed is scaled after it. That
works with any optimizer whose state does not depend on the step (AdamW's moments see the gradient only). Decoupled
weight decay is part of the step and is scaled too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from launch.errors import RunError
from launch.shards import Shard
from model.parameters import Kind
from model.stability.heads import add_squared_norms, scale_step
from model.stability.layers import HeadLayout
from model.stability.policies import LATENT_GAINS, quack_ratios

Table = dict[str, list[list[float]]]


class QueryKeyControl:
    """The rule QuacK over this rank's pieces of the query/key weights.

    Args:
        layouts: where the heads lie, by kind.
        shards: this rank's pieces of all parameters.
        has_qk_norm, max_ratio: see `quack_ratios`.
        is_replicated: whether every rank holds whole weights (ZeRO stage 0).
    """

    def __init__(
        self,
        layouts: Mapping[Kind, HeadLayout],
        shards: Sequence[Shard],
        has_qk_norm: bool,
        max_ratio: float | None,
        is_replicated: bool,
    ) -> None:
        self._layouts = layouts
        self._has_qk_norm = has_qk_norm
        self._max_ratio = max_ratio
        self._is_replicated = is_replicated
        place = {name: (kind, layer) for kind, layout in layouts.items() for layer, name in enumerate(layout.names)}
        self._pieces = [(shard, *place[shard.name]) for shard in shards if shard.name in place]
        self._pieces_of: dict[int, list[tuple[Shard, Kind, int]]] = {}
        for shard, kind, layer in self._pieces:
            if kind not in LATENT_GAINS:
                self._pieces_of.setdefault(id(shard.flat), []).append((shard, kind, layer))
        self._device = shards[0].flat.device if shards else torch.device("cpu")
        self._initial: dict[Kind, Tensor] | None = None
        self._ratios: dict[Kind, Tensor] = {}
        self._old: dict[int, Tensor] = {}

    def prepare(self) -> None:
        """Measures the weights and sets the ratios of the coming step: one all-reduce for all norms. Collective.

        The first call of a run (or of a run that takes up the policy) sets the initial norms.

        Raises:
            RunError: a head starts with zero weights.
        """
        norms = self._measure()
        if self._initial is None:
            self._refuse_zeros(norms)
            self._initial = norms
        self._ratios = quack_ratios(norms, self._initial, self._has_qk_norm, self._max_ratio)

    def before_base_step(self, flats: Sequence[Tensor]) -> None:
        """Keeps the masters that the optimizer is about to change."""
        for flat in flats:
            if id(flat) in self._pieces_of:
                self._old[id(flat)] = flat.detach().clone().view(-1)

    def after_base_step(self, flats: Sequence[Tensor]) -> None:
        """Scales what the optimizer has changed."""
        for flat in flats:
            old = self._old.pop(id(flat), None)
            if old is None:
                continue
            for shard, kind, layer in self._pieces_of[id(flat)]:
                ratio_H = self._ratios[kind][layer].to(torch.float32)
                scale_step(shard.master, shard.view(old), shard.start, self._layouts[kind].numel, ratio_H)

    def ratio_statistics(self) -> Tensor:
        """Smallest, mean and largest ratio of the last step in each layer: (3, L), fp64."""
        all_LN = torch.cat(list(self._ratios.values()), dim=-1)
        return torch.stack([all_LN.amin(dim=-1), all_LN.mean(dim=-1), all_LN.amax(dim=-1)])

    def state(self) -> Table:
        """The initial norms, for a checkpoint: kind -> one list of heads a layer."""
        return {kind.value: norms.tolist() for kind, norms in (self._initial or {}).items()}

    def load_state(self, state: Table) -> None:
        """Takes the initial norms of a checkpoint; an empty state means that the coming step sets them."""
        if state:
            self._initial = {
                Kind(kind): torch.tensor(norms, dtype=torch.float64, device=self._device)
                for kind, norms in state.items()
            }

    def _measure(self) -> dict[Kind, Tensor]:
        """Norm of every head: kind -> (L, heads), fp64, the same on all ranks."""
        sizes = {kind: len(layout.names) * layout.num_heads for kind, layout in self._layouts.items()}
        squares = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=self._device)
        tables = {
            kind: part.view(-1, self._layouts[kind].num_heads)
            for kind, part in zip(sizes, squares.split(list(sizes.values())), strict=True)
        }
        for shard, kind, layer in self._pieces:
            add_squared_norms(shard.master, shard.start, self._layouts[kind].numel, tables[kind][layer])
        if not self._is_replicated:
            dist.all_reduce(squares)
        return {kind: table.sqrt() for kind, table in tables.items()}

    def _refuse_zeros(self, norms: Mapping[Kind, Tensor]) -> None:
        for kind, table in norms.items():
            for layer, head in (table == 0).nonzero().tolist():
                raise RunError(
                    f"qk_control.policy=quack divides by the initial norm of every head, and head {head} of "
                    f"{self._layouts[kind].names[layer]} is zero; set model.init_std, or qk_control.policy=constant"
                )
