"""Where each parameter's fp32 master weights lie on this rank, at every ZeRO stage.

DeepSpeed hands its base optimizer flat fp32 tensors. A parameter, flattened, is one range of numbers; a rank owns a
piece [start, stop) of it, which lies at `offset` in one of those flat tensors. Checkpoints and per-head rules are
written against these pieces and need not know the stage.

    parameter w (flattened)   0 ........ start ######## stop ..... numel
    flat fp32 tensor                 [ other | ######## | other | padding ]
                                             ^ offset
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """This rank's piece of one parameter.

    Attributes:
        name, shape: of the whole parameter.
        start, stop: the piece's range in the flattened parameter.
        flat: the fp32 tensor that the base optimizer updates; its optimizer state has the same layout.
        offset: where the piece begins in `flat`.
        replicated: whether every rank holds the same piece (ZeRO stage 0).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    flat: Tensor
    offset: int
    replicated: bool

    def view(self, flat_like: Tensor) -> Tensor:
        """The piece within a tensor laid out like `flat` (masters, a gradient or an optimizer state), 1-D."""
        return flat_like.detach().view(-1).narrow(0, self.offset, self.stop - self.start)

    @property
    def master(self) -> Tensor:
        """The fp32 master weights of the piece, 1-D, sharing memory."""
        return self.view(self.flat)


def local_shards(engine: Any) -> list[Shard]:
    """The pieces of all trained parameters on this rank, in the model's order; ranks without a piece skip it.

    Args:
        engine: a DeepSpeed engine at ZeRO stage 0 (fp32 weights), 1, 2 or 3 without offload.
    """
    return [shard for name, parameter in engine.module.named_parameters() for shard in _pieces(engine, name, parameter)]


def _pieces(engine: Any, name: str, parameter: Any) -> Iterator[Shard]:
    if hasattr(parameter, "ds_id"):
        optimizer = engine.optimizer
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = torch.distributed.get_rank() * parameter.partition_numel()
        stop = min(start + parameter.partition_numel(), parameter.ds_numel)
        if start < stop:
            flat = optimizer.fp32_partitioned_groups_flat[group]
            yield Shard(name, tuple(parameter.ds_shape), start, stop, flat, offset, False)
    elif hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        if mapping is not None:
            address = mapping.lp_fragment_address
            yield Shard(
                name,
                tuple(parameter.shape),
                address.start,
                address.start + address.numel,
                _flat_partitions(engine.optimizer)[mapping.param_group_index],
                mapping.hp_fragment_address.start,
                False,
            )
    else:
        yield Shard(name, tuple(parameter.shape), 0, parameter.numel(), parameter, 0, True)


def local_flats(engine: Any) -> list[Tensor]:
    """The tensors that the base optimizer updates on this rank, in the same order on all ranks."""
    if engine.zero_optimization_stage() == 0:
        return list(engine.module.parameters())
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return _flat_partitions(engine.optimizer)


def _flat_partitions(zero_optimizer: Any) -> list[Tensor]:
    """This rank's flat fp32 partition of every parameter group (stages 1 and 2; BF16_Optimizer names it otherwise)."""
    if hasattr(zero_optimizer, "single_partition_of_fp32_groups"):
        return list(zero_optimizer.single_partition_of_fp32_groups)
    return list(zero_optimizer.fp32_groups_flat_partition)


def publish_masters(engine: Any) -> None:
    """Makes the model's working weights equal to the (changed) fp32 masters, on all ranks. Collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
