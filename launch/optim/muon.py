"""Muon for hidden matrices and AdamW for everything else, as one optimizer over DeepSpeed's flat fp32 tensors.

Momentum is elementwise, so each rank keeps that of its own pieces. Newton-Schulz needs whole matrices, so every matrix
has one rank that orthogonalises it, its owner: all pieces travel to the owners, and the results travel back.

    rank 0   [ ==A== | =B       momentum + gradient        [ step of A | step o
    rank 1     == | ==C== ]     of the local pieces          f B | step of C ]
                  |                                              ^
                  |  all-to-all: a matrix's pieces               |  all-to-all: the same
                  v  to its owner                                |  pieces back
    owner of A and C: [A][C]   owner of B: [B]   ->   Newton-Schulz on whole matrices

DeepSpeed calls the base optimizer once in all, once per group, or once per sub-group, by stage; every call exchanges
only the matrices that it sees, and all ranks make the same calls. At stage 0 each rank has whole gradients, so only
results travel; on one rank nothing does. What is sent is fp32.

Memory: 4 bytes of momentum for each number of a Muon matrix, shared by the ranks like AdamW's 8 bytes of moments. For
the time of a call, up to three fp32 copies of the matrices seen, about evenly shared by the ranks (at stage 0: whole on
each), and in the iteration about four times `MAX_BATCH_NUMEL` numbers, or four times the largest matrix.
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
MAX_BATCH_NUMEL = 2**25  # equal shapes are orthogonalised together up to this many numbers


@dataclass(frozen=True)
class Block:
    """What is orthogonalised as one matrix: a parameter, or one head's rows of it; a range of the flattened parameter.

    Attributes:
        name: of the parameter.
        start: where the block begins in it.
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
    """The part of a block that lies on one rank: numbers [start, stop) of the flattened parameter."""

    block: Block
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


Piece = tuple[str, int, int]  # a rank's piece of a parameter, of which it has one at most: name, start, stop


@dataclass(frozen=True)
class Plan:
    """Who orthogonalises what in one kind of call, and what this rank sends and receives.

    Attributes:
        blocks: this rank orthogonalises these; equal shapes stand side by side.
        outgoing: this rank's pieces of all blocks, in the order in which they are sent to the owners and come back.
        outgoing_sizes: numbers for each owner.
        incoming: all ranks' pieces of this rank's blocks, in the order in which they come.
        incoming_sizes: numbers from each rank.
        order: the positions in `incoming`, block by block.
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
        ValueError: the parameter is not a matrix.
    """
    if len(shape) != 2:
        raise ValueError(f"{name}: has shape {tuple(shape)}, and Muon is for matrices only")
    rows, cols = shape[0] // num_heads, shape[1]
    return [Block(name, head * rows * cols, rows, cols) for head in range(num_heads)]


def assign_owners(costs: Sequence[int], num_ranks: int) -> list[int]:
    """A rank for each block: the dearest first, each to the rank with the least work so far.

    The busiest rank has at most the mean load plus (1 - 1/ranks) of one block's cost (Graham 1969).
    """
    loads = [0] * num_ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def make_plan(blocks: Sequence[Block], pieces: Sequence[Sequence[Piece]], rank: int) -> Plan:
    """The plan of one rank; a pure function, whose results on all ranks fit together.

    Args:
        blocks: that one call sees, in an order that is the same on all ranks.
        pieces: of every rank.
    """
    owners = assign_owners([block.cost for block in blocks], len(pieces))
    owner_of = dict(zip(blocks, owners, strict=True))
    ordered = sorted(blocks, key=lambda block: (owner_of[block], block.shape))
    mine = [block for block in ordered if owner_of[block] == rank]
    outgoing = _fragments(ordered, pieces[rank])
    outgoing_sizes = [0] * len(pieces)
    for fragment in outgoing:
        outgoing_sizes[owner_of[fragment.block]] += fragment.numel
    parts = [_fragments(mine, source_pieces) for source_pieces in pieces]
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


def _fragments(blocks: Sequence[Block], pieces: Sequence[Piece]) -> list[Fragment]:
    """The parts of blocks within one rank's pieces, block by block."""
    range_of = {name: (start, stop) for name, start, stop in pieces}
    fragments = []
    for block in blocks:
        start, stop = range_of.get(block.name, (0, 0))
        first, last = max(start, block.start), min(stop, block.stop)
        if first < last:
            fragments.append(Fragment(block, first, last))
    return fragments


def orthogonalise_blocks(flat: Tensor, blocks: Sequence[Block], steps: int, dtype: torch.dtype) -> None:
    """Turns the blocks, which stand one after the other in the 1-D `flat`, into Muon's steps at rate 1, in place."""
    offset = 0
    for (rows, cols), group in itertools.groupby(blocks, key=lambda block: block.shape):
        count = sum(1 for _ in group)
        batch_NRC = flat.narrow(0, offset, count * rows * cols).view(count, rows, cols)
        for part_NRC in batch_NRC.split(max(1, MAX_BATCH_NUMEL // (rows * cols))):
            part_NRC.copy_(orthogonalise(part_NRC, steps, dtype).mul_(step_scale(rows, cols)))
        offset += count * rows * cols


class Exchange:
    """Orthogonalises matrices whose pieces lie on all ranks. Making one is collective.

    Args:
        blocks: of every matrix that has Muon, by parameter.
        shards: this rank's pieces of all parameters.
        flats: the tensors that the base optimizer updates, in the same order on all ranks.
        steps, dtype: of the iteration, see `orthogonalise`.
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
        self._pieces: list[list[tuple[int, Piece]]] = share(mine)
        self._plans: dict[frozenset[int], Plan] = {}

    def plan(self, flats: Iterable[Tensor]) -> Plan:
        """The plan of a call that sees these tensors; made once for each set of them."""
        seen = frozenset(self._index_of[id(flat)] for flat in flats)
        if seen not in self._plans:
            pieces = [[piece for index, piece in rank_pieces if index in seen] for rank_pieces in self._pieces]
            names = {name for rank_pieces in pieces for name, _, _ in rank_pieces}
            blocks = [block for name, parts in self._blocks.items() if name in names for block in parts]
            self._plans[seen] = make_plan(blocks, pieces, self._rank)
        return self._plans[seen]

    def view(self, fragment: Fragment, flat_like: Tensor) -> Tensor:
        """A fragment within a tensor laid out like its flat tensor, 1-D, sharing memory."""
        shard = self._shards[fragment.block.name]
        return shard.view(flat_like).narrow(0, fragment.start - shard.start, fragment.numel)

    def flat(self, fragment: Fragment) -> Tensor:
        """The tensor that the base optimizer updates and that holds a fragment."""
        return self._shards[fragment.block.name].flat

    def orthogonalise(self, plan: Plan, outgoing: Tensor) -> Tensor:
        """Muon's steps at rate 1 for this rank's pieces. Collective.

        Args:
            outgoing: 1-D fp32, what to orthogonalise: the plan's outgoing pieces one after the other; is overwritten.

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
    """Sends the 1-D buffer's consecutive parts to the ranks in turn; returns what came from them. Collective."""
    if len(sizes) == 1:
        return buffer
    out = buffer.new_empty(sum(out_sizes))
    dist.all_to_all_single(out, buffer, out_sizes, sizes)
    return out


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the groups whose key `algorithm` is `muon`, torch's fused AdamW for those with `adamw`.

    Muon, for a matrix W with gradient G (Jordan et al. 2024, with Nesterov momentum; scale and decay by Liu et al.,
    arXiv 2502.16982; momentum as in `torch.optim.Muon`):

        M ← momentum M + (1 - momentum) G
        O ← orthogonalise((1 - momentum) G + momentum M)
        W ← W - lr (weight_decay W + 0.2 sqrt(max(rows, cols)) O)

    The state has torch's names: `momentum_buffer`, or `exp_avg` and `exp_avg_sq`; and `step` for every tensor.

    Args:
        groups: dicts with `params`, `algorithm`, and whatever differs from the defaults.
        newton_schulz_steps: iterations of the orthogonalisation.
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
        """Tells where the matrices lie, once DeepSpeed has laid them out; before the first step. Collective.

        Args:
            blocks: of every matrix that has Muon, by parameter.
            shards: this rank's pieces of all parameters.
            flats: the tensors that will be updated, in the same order on all ranks.
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
        assert self._exchange is not None, "bind() comes before the first step"
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
        """The state of a tensor, with zeros for what it does not have yet."""
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
