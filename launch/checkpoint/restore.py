"""Loads a checkpoint into the engine, at any ZeRO stage and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.checkpoint.files import (
    MASTER,
    POLICY_PREFIX,
    CheckpointReader,
    parameter_mismatches,
)
from launch.distributed.collective import on_all_ranks
from launch.engine.engine import Engine
from launch.errors import RunError


def restore(engine: Engine, checkpoint: Path, weights_only: bool = False) -> None:
    """Loads master weights, optimizer state, policy state and, on the same number of ranks, random states. Collective.

    Args:
        weights_only: Load only the master weights, for `run.init_from`.

    Raises:
        SharedError: The parameters differ from the model's (every difference is named), or a file cannot be read.
    """
    on_all_ranks(lambda: _read_shards(engine, checkpoint, weights_only))
    engine.sync_model_weights()
    if not weights_only:
        engine.load_policy(*on_all_ranks(lambda: _read_policy(checkpoint)))


def _read_policy(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with CheckpointReader(checkpoint) as reader:
        return reader.state.policy_state, reader.read_rank_tensors(0, POLICY_PREFIX)


def _read_shards(engine: Engine, checkpoint: Path, weights_only: bool) -> None:
    with CheckpointReader(checkpoint) as reader:
        mismatches = list(parameter_mismatches(reader.state.parameters, engine.parameter_shapes()))
        if mismatches:
            raise RunError(f"{checkpoint} does not match the model: {'; '.join(mismatches)}")
        for shard in engine.shards():
            reader.read_range(MASTER, shard.name, shard.master, shard.start)
            kinds = [] if weights_only else reader.optimizer_tensors(shard.name)
            state = engine.base_optimizer.state[shard.flat] if kinds else {}
            for kind in kinds:
                if kind not in state:
                    state[kind] = torch.zeros_like(shard.flat, requires_grad=False)
                reader.read_range(kind, shard.name, shard.view(state[kind]), shard.start)
            for kind, value in reader.state.optimizer_scalars.items() if kinds else ():
                state[kind] = torch.tensor(value, dtype=torch.float32, device=shard.flat.device)
        if not weights_only and reader.state.num_ranks == engine.world_size:
            _restore_random_state(reader, engine)


def _restore_random_state(reader: CheckpointReader, engine: Engine) -> None:
    cpu_state = reader.read_rank_tensor(engine.rank, "rng/cpu")
    if cpu_state is not None:
        torch.set_rng_state(cpu_state)
    cuda_state = reader.read_rank_tensor(engine.rank, "rng/cuda")
    if cuda_state is not None and engine.device.type == "cuda":
        torch.cuda.set_rng_state(cuda_state, engine.device)
