"""Saves a checkpoint from all ranks; `launch.checkpoint.files` describes its files."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.load import to_yaml
from configs.schema import Config
from data.files import sync, write_file
from launch.checkpoint.files import (
    CONFIG,
    MANIFEST,
    MASTER,
    POLICY_PREFIX,
    STATE,
    TrainingState,
    file_entry,
    find_faults,
    rank_file,
    write_state,
)
from launch.checkpoint.retention import delete_checkpoint
from launch.checkpoint.safetensors_stream import StreamedTensor, write_safetensors
from launch.distributed.collective import on_all_ranks, on_main_rank, share
from launch.distributed.shards import Shard
from launch.engine.engine import Engine
from launch.errors import RunError, SharedError
from launch.run_folder.checkpoints import checkpoint_path, partial_path

log = logging.getLogger(__name__)


def save_checkpoint(
    checkpoints: Path, engine: Engine, config: Config, state: TrainingState, tokenizer: Path | None
) -> Path:
    """Writes a checkpoint under a temporary name and commits it with one rename. Collective.

    Raises:
        SharedError: A rank could not write (raised on every rank). The unfinished folder is removed, and older
            checkpoints are untouched.
    """
    final = checkpoint_path(checkpoints, state.step)
    partial = partial_path(final)
    try:
        on_main_rank(lambda: _make_empty(partial))
        entries = share(on_all_ranks(lambda: _write_files(partial, engine, config, state, tokenizer)))
        files = {name: entry for part in entries for name, entry in part.items()}
        on_main_rank(lambda: _commit(partial, final, files))
    except SharedError:
        on_main_rank(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise
    return final


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    checkpoints = folder.parent
    if not checkpoints.parent.is_dir():  # creating it again could write to the wrong disk if a mount is gone
        raise OSError(f"{checkpoints.parent}: the run's folder no longer exists")
    checkpoints.mkdir(exist_ok=True)
    folder.mkdir()
    sync(checkpoints.parent)


def _write_files(
    folder: Path, engine: Engine, config: Config, state: TrainingState, tokenizer: Path | None
) -> dict[str, Any]:
    """Writes this rank's files (on rank 0 also the shared ones) and returns their manifest entries.

    Raises:
        RunError: A master weight is non-finite, which would make the checkpoint useless.
        OSError: A file cannot be written; the message names it.
    """
    for shard in engine.shards():
        if not shard.master.isfinite().all():
            raise RunError(f"{shard.name} has non-finite weights")
    path = folder / rank_file(engine.rank)
    tensors, ranges = _rank_tensors(engine)
    digest = write_safetensors(path, tensors, {"ranges": json.dumps(ranges)})
    entries = {path.name: {"bytes": path.stat().st_size, "xxh3_128": digest}}
    if engine.rank == 0:
        write_state(folder, state)
        write_file(folder / CONFIG, to_yaml(config).encode())
        names = [STATE, CONFIG]
        if tokenizer is not None and state.tokenizer_file is not None:
            shutil.copyfile(tokenizer, folder / state.tokenizer_file)
            sync(folder / state.tokenizer_file)
            names.append(state.tokenizer_file)
        entries |= {name: file_entry(folder / name) for name in names}
    return entries


def _rank_tensors(engine: Engine) -> tuple[list[StreamedTensor], dict[str, tuple[int, int]]]:
    """The tensors of this rank's file, and the range of every shard in its parameter."""
    tensors = {"rng/cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(engine.device)
    if engine.rank == 0:
        tensors |= {f"{POLICY_PREFIX}{name}": tensor for name, tensor in engine.policy_tensors().items()}
    ranges = {}
    for shard in engine.shards():
        first, last = _owned_part(shard, engine.rank, engine.world_size)
        if first == last:
            continue
        ranges[shard.name] = (shard.start + first, shard.start + last)
        state = engine.base_optimizer.state.get(shard.flat, {})
        for kind, flat in {MASTER: shard.flat, **_state_tensors(shard.flat, state)}.items():
            tensors[f"{kind}/{shard.name}"] = shard.view(flat)[first:last]
    return [StreamedTensor.of(name, tensor) for name, tensor in tensors.items()], ranges


def _owned_part(shard: Shard, rank: int, world_size: int) -> tuple[int, int]:
    """The range of its shard that this rank writes: all of it, or an even share if the shard is replicated."""
    length = shard.stop - shard.start
    if not shard.replicated:
        return 0, length
    return length * rank // world_size, length * (rank + 1) // world_size


def optimizer_tensor_kinds(engine: Engine) -> list[str]:
    """The names of the per-parameter optimizer tensors; empty before the first step.

    For AdamW exp_avg and exp_avg_sq. With Muon also momentum_buffer; then each parameter has either AdamW's or Muon's.
    """
    states = engine.base_optimizer.state.items()
    return sorted({kind for flat, state in states for kind in _state_tensors(flat, state)})


def _state_tensors(flat: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    """The entries of a tensor's optimizer state that are laid out like the tensor."""
    return {
        kind: value
        for kind, value in state.items()
        if isinstance(value, Tensor) and value.shape == flat.shape and value.dim() > 0
    }


def optimizer_scalars(engine: Engine) -> dict[str, float]:
    """The optimizer's scalars (for AdamW and Muon: step), which are the same for all tensors."""
    scalars: dict[str, float] = {}
    for state in engine.base_optimizer.state.values():
        for kind, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                scalars[kind] = max(scalars.get(kind, 0.0), float(value))
    return scalars


def _commit(partial: Path, final: Path, files: dict[str, Any]) -> None:
    write_file(partial / MANIFEST, json.dumps({"files": files}, indent=1).encode())
    faults = find_faults(partial, check_hashes=False)
    if faults:
        raise RunError("; ".join(faults))
    if final.exists():
        delete_checkpoint(final)
    partial.rename(final)
    sync(final.parent)
