"""Muon for hidden matrices and AdamW for everything else, as one optimizer over DeepSpeed's flat fp32 tensors.

Momentum is elementwise, so each rank keeps the momentum of its own shards. Newton-Schulz needs whole matrices, so every
matrix has an owner, the rank that orthogonalises it: all shards are sent to the owners, and the results are sent back.

    rank 0   [ ==A== | =B       momentum + gradient        [ step of A | step o
    rank 1     == | ==C== ]     of the local shards          f B | step of C ]
                  |                                              ^
                  |  all-to-all: a matrix's fragments            |  all-to-all: the same
                  v  to its owner                                |  fragments back
    owner of A and C: [A][C]   owner of B: [B]   ->   Newton-Schulz on whole matrices

Depending on the stage, DeepSpeed calls the base optimizer once per step, per group, or per sub-group. Every call
exchanges only the matrices in it, and all ranks make the same calls. At stage 0 each rank has all gradients, so only
results are sent; on one rank nothing is. Transfers are in fp32.

Memory: 4 bytes of momentum per element of a Muon matrix, partitioned over the ranks like AdamW's 8 bytes of moments.
During a call, up to three fp32 copies of the matrices in it, spread about evenly over the ranks (at stage 0: all of
them on each rank), and in the iteration about four times `MAX_BATCH_NUMEL` elements, or four times the largest matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim.adamw import adamw

from launch.distributed.collective import share
from launch.distributed.shards import Shard
from model.stability.orthogonal import orthogonalise, step_scale

MUON, ADAMW = "muon", "adamw"
MAX_BATCH_NUMEL = 2**25  # matrices of equal shape are orthogonalised in batches of up to this many elements


@dataclass(frozen=True)
class Block:
    """A matrix to orthogonalise: a parameter or one head's rows of it, which is a range of the flattened parameter.

    Attributes:
        name: The parameter's name.
        start: The offset of the block in the flattened parameter.
    """

    name: str
    start: int
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def cost(self) -> int:
        """Multiply-adds of one Newton-Schulz iteration."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)


@dataclass(frozen=True)
class Fragment:
    """The part of a block that is on one rank: elements [start, stop) of the flattened parameter."""

    block: Block
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


ShardRange = tuple[str, int, int]  # parameter, start, stop; a rank has at most one shard of a parameter


@dataclass(frozen=True)
class Plan:
    """What this rank orthogonalises, sends and receives in a call that sees a given set of tensors.

    Attributes:
        blocks: The blocks that this rank owns; equal shapes are adjacent.
        outgoing: This rank's fragments of all blocks, in the order in which they are sent and returned.
        outgoing_sizes: The number of elements sent to each owner.
        incoming: All ranks' fragments of this rank's blocks, in the order in which they arrive.
        incoming_sizes: The number of elements received from each rank.
        order: The positions in `incoming`, block by block.
    """

    blocks: list[Block]
    outgoing: list[Fragment]
    outgoing_sizes: list[int]
    incoming: list[Fragment]
    incoming_sizes: list[int]
    order: list[int]


def split_into_blocks(name: str, shape: Sequence[int], num_heads: int = 1) -> list[Block]:
    """The blocks of a parameter of shape (heads x width, inputs).

    Raises:
        ValueError: The parameter is not a matrix.
    """
    if len(shape) != 2:
        raise ValueError(f"{name}: has shape {tuple(shape)}; Muon expects a matrix")
    rows, cols = shape[0] // num_heads, shape[1]
    return [Block(name, head * rows * cols, rows, cols) for head in range(num_heads)]


def assign_owners(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Assigns a rank to each block: largest cost first, each to the rank with the lowest load so far.

    The busiest rank has at most the mean load plus (1 - 1/ranks) of one block's cost (Graham 1969).
    """
    loads = [0] * num_ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def make_plan(blocks: Sequence[Block], shard_ranges: Sequence[Sequence[ShardRange]], rank: int) -> Plan:
    """Returns the plan of one rank. A pure function, so that the plans of all ranks match.

    Args:
        blocks: The blocks in the call, in the same order on all ranks.
        shard_ranges: The shards of every rank.
    """
    owners = assign_owners([block.cost for block in blocks], len(shard_ranges))
    owner_of = dict(zip(blocks, owners, strict=True))
    ordered = sorted(blocks, key=lambda block: (owner_of[block], block.shape))
    mine = [block for block in ordered if owner_of[block] == rank]
    outgoing = _fragments(ordered, shard_ranges[rank])
    outgoing_sizes = [0] * len(shard_ranges)
    for fragment in outgoing:
        outgoing_sizes[owner_of[fragment.block]] += fragment.numel
    parts = [_fragments(mine, ranges) for ranges in shard_ranges]
    incoming = [fragment for part in parts for fragment in part]
    position = {block: index for index, block in enumerate(mine)}
    return Plan(
        blocks=mine,
        outgoing=outgoing,
        outgoing_sizes=outgoing_sizes,
        incoming=incoming,
        incoming_sizes=[sum(fragment.numel for fragment in part) for part in parts],
        order=sorted(range(len(incoming)), key=lambda i: (position[incoming[i].block], incoming[i].start)),
    )


def _fragments(blocks: Sequence[Block], shard_ranges: Sequence[ShardRange]) -> list[Fragment]:
    """The fragments of blocks in one rank's shards, block by block."""
    range_of = {name: (start, stop) for name, start, stop in shard_ranges}
    fragments = []
    for block in blocks:
        start, stop = range_of.get(block.name, (0, 0))
        first, last = max(start, block.start), min(stop, block.stop)
        if first < last:
            fragments.append(Fragment(block, first, last))
    return fragments


def orthogonalise_blocks(flat: Tensor, blocks: Sequence[Block], steps: int, dtype: torch.dtype) -> None:
    """Replaces the blocks, concatenated in the 1-D `flat`, by Muon's steps at a learning rate of 1, in place."""
    offset = 0
    for (rows, cols), group in itertools.groupby(blocks, key=lambda block: block.shape):
        count = sum(1 for _ in group)
        batch_NRC = flat.narrow(0, offset, count * rows * cols).view(count, rows, cols)
        for part_NRC in batch_NRC.split(max(1, MAX_BATCH_NUMEL // (rows * cols))):
            part_NRC.copy_(orthogonalise(part_NRC, steps, dtype).mul_(step_scale(rows, cols)))
        offset += count * rows * cols


class Exchange:
    """Orthogonalises matrices that are sharded over all ranks. The constructor is collective.

    Args:
        blocks: The blocks of every parameter that Muon updates, by parameter.
        shards: This rank's shards of all parameters.
        flats: The tensors that the base optimizer updates, in the same order on all ranks.
        steps, dtype: Number of iterations and their type; see `orthogonalise`.
    """

    def __init__(
        self,
        blocks: Mapping[str, Sequence[Block]],
        shards: Sequence[Shard],
        flats: Sequence[Tensor],
        steps: int,
        dtype: torch.dtype,
    ) -> None:
        self._blocks = blocks
        self._shards = {shard.name: shard for shard in shards if shard.name in blocks}
        self._steps = steps
        self._dtype = dtype
        self._rank = dist.get_rank()
        self._is_replicated = any(shard.replicated for shard in shards)
        self._index_of = {id(flat): index for index, flat in enumerate(flats)}
        mine = [
            (self._index_of[id(shard.flat)], (shard.name, shard.start, shard.stop)) for shard in self._shards.values()
        ]
        self._shard_ranges: list[list[tuple[int, ShardRange]]] = share(mine)
        self._plans: dict[frozenset[int], Plan] = {}

    def plan(self, flats: Iterable[Tensor]) -> Plan:
        """The plan of a call that sees these tensors, cached for each set of them."""
        seen = frozenset(self._index_of[id(flat)] for flat in flats)
        if seen not in self._plans:
            shard_ranges = [
                [shard_range for index, shard_range in ranges if index in seen] for ranges in self._shard_ranges
            ]
            names = {name for ranges in shard_ranges for name, _, _ in ranges}
            blocks = [block for name, parts in self._blocks.items() if name in names for block in parts]
            self._plans[seen] = make_plan(blocks, shard_ranges, self._rank)
        return self._plans[seen]

    def view(self, fragment: Fragment, flat_like: Tensor) -> Tensor:
        """A 1-D view of a fragment in a tensor that is laid out like the fragment's flat tensor."""
        shard = self._shards[fragment.block.name]
        return shard.view(flat_like).narrow(0, fragment.start - shard.start, fragment.numel)

    def flat(self, fragment: Fragment) -> Tensor:
        """The flat tensor of the base optimizer that holds a fragment."""
        return self._shards[fragment.block.name].flat

    def orthogonalise(self, plan: Plan, outgoing: Tensor) -> Tensor:
        """Muon's steps at a learning rate of 1 for this rank's fragments. Collective.

        Args:
            outgoing: 1-D fp32, what to orthogonalise: the plan's outgoing fragments, concatenated. Overwritten.

        Returns:
            The steps, laid out like `outgoing`.
        """
        if self._is_replicated:
            mine = outgoing.split(plan.outgoing_sizes)[self._rank]
            orthogonalise_blocks(mine, plan.blocks, self._steps, self._dtype)
            num_ranks = len(plan.outgoing_sizes)
            return _all_to_all(mine.repeat(num_ranks), [mine.numel()] * num_ranks, plan.outgoing_sizes)
        received = _all_to_all(outgoing, plan.outgoing_sizes, plan.incoming_sizes)
        parts = received.split([fragment.numel for fragment in plan.incoming])
        mine = torch.cat([received[:0], *(parts[position] for position in plan.order)])
        orthogonalise_blocks(mine, plan.blocks, self._steps, self._dtype)
        results = mine.split([parts[position].numel() for position in plan.order])
        for position, result in zip(plan.order, results, strict=True):
            parts[position].copy_(result)
        del mine, results
        return _all_to_all(received, plan.incoming_sizes, plan.outgoing_sizes)


def _all_to_all(buffer: Tensor, sizes: list[int], out_sizes: list[int]) -> Tensor:
    """Sends consecutive parts of the 1-D buffer to the ranks; returns what they sent, concatenated. Collective."""
    if len(sizes) == 1:
        return buffer
    out = buffer.new_empty(sum(out_sizes))
    dist.all_to_all_single(out, buffer, out_sizes, sizes)
    return out


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for groups whose `algorithm` is `muon`, and torch's fused AdamW for those with `adamw`.

    Muon, for a matrix W with gradient G (Jordan et al. 2024, with Nesterov momentum; scale and decay by Liu et al.,
    arXiv 2502.16982; momentum as in `torch.optim.Muon`):

        M ← momentum M + (1 - momentum) G
        O ← orthogonalise((1 - momentum) G + momentum M)
        W ← W - lr (weight_decay W + 0.2 sqrt(max(rows, cols)) O)

    The state uses torch's names: `momentum_buffer`, or `exp_avg` and `exp_avg_sq`; and `step` for every tensor.

    Args:
        groups: Dicts with `params`, `algorithm`, and any options that differ from the defaults.
        newton_schulz_steps: The number of iterations of the orthogonalisation.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        newton_schulz_steps: int,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "weight_decay": 0.0})
        self._newton_schulz_steps = newton_schulz_steps
        self._exchange: Exchange | None = None

    def bind(self, blocks: Mapping[str, Sequence[Block]], shards: Sequence[Shard], flats: Sequence[Tensor]) -> None:
        """Sets where the matrices are, once DeepSpeed has partitioned them and before the first step. Collective.

        Args:
            blocks: The blocks of every parameter that Muon updates, by parameter.
            shards: This rank's shards of all parameters.
            flats: The tensors that the optimizer updates, in the same order on all ranks.
        """
        on_gpu = any(flat.is_cuda for flat in flats)
        dtype = torch.bfloat16 if on_gpu else torch.float32  # CPUs are slow in bf16
        self._exchange = Exchange(blocks, shards, flats, self._newton_schulz_steps, dtype)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the tensors in `param_groups` that have gradients. Collective, with the same tensors on all ranks."""
        muon_groups = []
        for group in self.param_groups:
            flats = [flat for flat in group["params"] if flat.grad is not None]
            if not flats:
                continue
            if group["algorithm"] == MUON:
                muon_groups.append((group, flats))
            else:
                self._adamw_step(group, flats)
        if muon_groups:
            self._muon_step(muon_groups)

    def _adamw_step(self, group: dict[str, Any], flats: list[Tensor]) -> None:
        states = [self._state(flat, "exp_avg", "exp_avg_sq") for flat in flats]
        beta1, beta2 = group["betas"]
        adamw(
            flats,
            [_gradient(flat) for flat in flats],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _muon_step(self, groups: list[tuple[dict[str, Any], list[Tensor]]]) -> None:
        assert self._exchange is not None, "bind() must be called before the first step"
        exchange = self._exchange
        group_of = {}
        for group, flats in groups:
            for flat in flats:
                group_of[id(flat)] = group
                state = self._state(flat, "momentum_buffer")
                state["step"] += 1
                state["momentum_buffer"].lerp_(_gradient(flat), 1 - group["momentum"])
                flat.mul_(1 - group["lr"] * group["weight_decay"])

        plan = exchange.plan(flat for _, flats in groups for flat in flats)
        places = [(fragment, exchange.flat(fragment)) for fragment in plan.outgoing]
        device = groups[0][1][0].device
        outgoing = torch.empty(sum(plan.outgoing_sizes), dtype=torch.float32, device=device)
        sizes = [fragment.numel for fragment in plan.outgoing]
        for (fragment, flat), out in zip(places, outgoing.split(sizes), strict=True):
            gradient = exchange.view(fragment, _gradient(flat))
            momentum = exchange.view(fragment, self.state[flat]["momentum_buffer"])
            torch.lerp(gradient, momentum, group_of[id(flat)]["momentum"], out=out)
        steps = exchange.orthogonalise(plan, outgoing)
        for (fragment, flat), step in zip(places, steps.split(sizes), strict=True):
            exchange.view(fragment, flat).add_(step, alpha=-group_of[id(flat)]["lr"])

    def _state(self, flat: Tensor, *kinds: str) -> dict[str, Tensor]:
        """The optimizer state of a tensor; missing entries are created as zeros."""
        state: dict[str, Tensor] = self.state[flat]
        for kind in kinds:
            if kind not in state:
                state[kind] = torch.zeros_like(flat, requires_grad=False)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
        return state


def _gradient(flat: Tensor) -> Tensor:
    assert flat.grad is not None
    return flat.grad
