"""Saving and restoring over all ranks. The files themselves are `launch.checkpoint_files`' business."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from configs.load import write_yaml
from configs.schema import CheckpointConfig, Config
from launch.checkpoint_files import (
    CONFIG,
    MANIFEST,
    MASTER,
    PARTIAL_SUFFIX,
    STATE,
    CheckpointReader,
    TrainingState,
    checkpoint_path,
    file_entry,
    find_checkpoint,
    find_faults,
    list_checkpoints,
    parameter_mismatches,
    rank_file,
    sync,
    write_json,
    write_state,
)
from launch.collective import on_main_rank, share
from launch.engine import Engine
from launch.errors import RunError, SharedError
from launch.shards import Shard

log = logging.getLogger(__name__)


def save_checkpoint(
    checkpoints: Path, engine: Engine, config: Config, state: TrainingState, tokenizer: Path | None
) -> Path:
    """Writes a checkpoint beside its final name and commits it with one rename. Collective.

    Raises:
        SharedError: on every rank when any rank could not write; the unfinished folder is removed and older
            checkpoints are untouched.
    """
    final = checkpoint_path(checkpoints, state.step)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    on_main_rank(lambda: _make_empty(partial))
    entries: dict[str, Any] = {}
    problem = None
    try:
        entries = _write_files(partial, engine, config, state, tokenizer)
    except (OSError, SafetensorError) as error:
        problem = f"rank {engine.rank} cannot write to {partial}: {error}"
    outcomes = share((entries, problem))
    problems = [text for _, text in outcomes if text]
    if problems:
        on_main_rank(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise SharedError("; ".join(problems))
    files = {name: entry for part, _ in outcomes for name, entry in part.items()}
    on_main_rank(lambda: _commit(partial, final, files))
    return final


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write_files(
    folder: Path, engine: Engine, config: Config, state: TrainingState, tokenizer: Path | None
) -> dict[str, Any]:
    """This rank's files, on disk and read back; rank 0 also writes what is common. Returns their manifest entries."""
    paths = [folder / rank_file(engine.rank)]
    tensors, ranges = _rank_tensors(engine)
    save_file(tensors, paths[0], metadata={"ranges": json.dumps(ranges)})
    if engine.rank == 0:
        write_state(folder, state)
        write_yaml(config, folder / CONFIG)
        paths += [folder / STATE, folder / CONFIG]
        if tokenizer is not None and state.tokenizer_file is not None:
            shutil.copyfile(tokenizer, folder / state.tokenizer_file)
            paths.append(folder / state.tokenizer_file)
    for path in paths:
        sync(path)
    return {path.name: file_entry(path) for path in paths}


def _rank_tensors(engine: Engine) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """The tensors of this rank's file, and the range of every parameter's piece."""
    tensors: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(engine.device)
    ranges = {}
    for shard in engine.shards():
        first, last = _owned_part(shard, engine.rank, engine.world_size)
        if first == last:
            continue
        ranges[shard.name] = (shard.start + first, shard.start + last)
        state = engine.base_optimizer.state.get(shard.flat, {})
        kinds = {MASTER: shard.flat, **{kind: state[kind] for kind in optimizer_tensor_kinds(engine)}}
        for kind, flat in kinds.items():
            tensors[f"{kind}/{shard.name}"] = shard.view(flat)[first:last].cpu().contiguous().clone()
    return tensors, ranges


def _owned_part(shard: Shard, rank: int, world_size: int) -> tuple[int, int]:
    """What this rank writes of its piece: all, or an even share where every rank holds the same one."""
    length = shard.stop - shard.start
    if not shard.replicated:
        return 0, length
    return length * rank // world_size, length * (rank + 1) // world_size


def optimizer_tensor_kinds(engine: Engine) -> list[str]:
    """Names of the per-parameter optimizer tensors (for AdamW: exp_avg, exp_avg_sq); empty before the first step."""
    kinds = {
        kind
        for flat, state in engine.base_optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, Tensor) and value.shape == flat.shape and value.dim() > 0
    }
    return sorted(kinds)


def optimizer_scalars(engine: Engine) -> dict[str, float]:
    """The optimizer's per-tensor numbers (for AdamW: step), which are the same for all tensors."""
    scalars: dict[str, float] = {}
    for state in engine.base_optimizer.state.values():
        for kind, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                scalars[kind] = max(scalars.get(kind, 0.0), float(value))
    return scalars


def _commit(partial: Path, final: Path, files: dict[str, Any]) -> None:
    write_json(partial / MANIFEST, {"files": files})
    faults = find_faults(partial, check_hashes=False)
    if faults:
        raise RunError("; ".join(faults))
    sync(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    sync(final.parent)


def prune_checkpoints(checkpoints: Path, config: CheckpointConfig) -> None:
    """Deletes all but the newest `keep_last` checkpoints and the multiples of `keep_every`. For rank 0."""
    found = list_checkpoints(checkpoints)
    for step, path in found[: -config.keep_last]:
        if config.keep_every is None or step % config.keep_every:
            # Renamed first, so that a kill while deleting never leaves a half-deleted checkpoint under its name.
            doomed = path.with_name(path.name + PARTIAL_SUFFIX)
            path.rename(doomed)
            shutil.rmtree(doomed)


def clean_leftovers(checkpoints: Path) -> None:
    """Deletes what killed saves left behind. For rank 0, before the first save."""
    for path in checkpoints.glob(f"*{PARTIAL_SUFFIX}"):
        log.info("removing %s, left by a save that did not finish", path)
        shutil.rmtree(path)


def choose_checkpoint(resume: str, checkpoints: Path, rank: int, world_size: int) -> Path | None:
    """The checkpoint to go on from: the newest that verifies, the named one, or None to start afresh. Collective.

    Ranks share the verification. With `resume: auto` a damaged checkpoint is named and the next older one is taken.

    Raises:
        SharedError: the named checkpoint does not exist or is damaged, or all of the run's are damaged.
    """
    if resume == "never":
        return None
    if resume != "auto":
        named = on_main_rank(lambda: find_checkpoint(Path(resume)))
        faults = _shared_faults(named, rank, world_size)
        if faults:
            raise SharedError(f"run.resume: {named} is damaged: {'; '.join(faults)}")
        return named
    candidates = on_main_rank(lambda: [path for _, path in reversed(list_checkpoints(checkpoints))])
    for candidate in candidates:
        faults = _shared_faults(candidate, rank, world_size)
        if not faults:
            return candidate
        for fault in faults:
            log.warning("damaged checkpoint, trying the next older one: %s", fault)
    if candidates:
        raise SharedError(
            f"{checkpoints}: all {len(candidates)} checkpoints are damaged; "
            "restore one, or move the folder away to start afresh"
        )
    return None


def _shared_faults(checkpoint: Path, rank: int, world_size: int) -> list[str]:
    return [fault for part in share(find_faults(checkpoint, rank, world_size)) for fault in part]


def restore(engine: Engine, checkpoint: Path, weights_only: bool = False) -> TrainingState:
    """Loads masters, optimizer state and random states, at any ZeRO stage and number of ranks. Collective.

    Args:
        weights_only: only the master weights, for `run.init_from`.

    Raises:
        RunError: the parameters differ from the model's; every difference is named.
    """
    with CheckpointReader(checkpoint) as reader:
        shards = engine.shards()
        mismatches = list(parameter_mismatches(reader.state.parameters, engine.parameter_shapes()))
        if mismatches:
            raise SharedError(f"{checkpoint} does not fit the model: " + "; ".join(mismatches))
        kinds = [] if weights_only else reader.state.optimizer_tensors
        for shard in shards:
            reader.read_range(MASTER, shard.name, shard.master, shard.start)
            state = engine.base_optimizer.state[shard.flat] if kinds else {}
            for kind in kinds:
                state.setdefault(kind, torch.zeros_like(shard.flat, requires_grad=False))
                reader.read_range(kind, shard.name, shard.view(state[kind]), shard.start)
            for kind, value in reader.state.optimizer_scalars.items() if kinds else ():
                state[kind] = torch.tensor(value, dtype=torch.float32, device=shard.flat.device)
        if not weights_only and reader.state.num_ranks == engine.world_size:
            _restore_random_state(reader, engine)
        engine.publish_masters()
        return reader.state


def _restore_random_state(reader: CheckpointReader, engine: Engine) -> None:
    cpu_state = reader.read_rank_tensor(engine.rank, "rng/cpu")
    if cpu_state is not None:
        torch.set_rng_state(cpu_state)
    cuda_state = reader.read_rank_tensor(engine.rank, "rng/cuda")
    if cuda_state is not None and engine.device.type == "cuda":
        torch.cuda.set_rng_state(cuda_state, engine.device)
