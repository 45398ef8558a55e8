"""Saving and restoring over all ranks. The files themselves are `launch.checkpoint.files`' business."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.load import to_yaml
from configs.schema import CheckpointConfig, Config
from data.files import sync, write_file
from launch.checkpoint.files import (
    ASIDE_SUFFIX,
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
    write_state,
)
from launch.checkpoint.safetensors_stream import StreamedTensor, write_safetensors
from launch.distributed.collective import on_all_ranks, on_main_rank, share
from launch.distributed.shards import Shard
from launch.engine.engine import Engine
from launch.errors import RunError, SharedError

log = logging.getLogger(__name__)

_POLICY = "policy/"  # prefix of a query/key policy's tensors in rank 0's file


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
    if not checkpoints.parent.is_dir():  # made again, it would lie on another disk where a mounted one has vanished
        raise OSError(f"{checkpoints.parent}: the run's folder has vanished")
    checkpoints.mkdir(exist_ok=True)
    folder.mkdir()
    sync(checkpoints.parent)


def _write_files(
    folder: Path, engine: Engine, config: Config, state: TrainingState, tokenizer: Path | None
) -> dict[str, Any]:
    """This rank's files, on disk; rank 0 also writes what is common. Returns their manifest entries.

    Raises:
        RunError: a master weight is not finite, so that the checkpoint would be good for nothing.
        OSError: with the file that could not be written.
    """
    for shard in engine.shards():
        if not shard.master.isfinite().all():
            raise RunError(f"{shard.name} holds weights that are not finite")
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
    """The tensors of this rank's file, and the range of every parameter's piece."""
    tensors = {"rng/cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(engine.device)
    if engine.rank == 0:
        tensors |= {f"{_POLICY}{name}": tensor for name, tensor in engine.policy_tensors().items()}
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
    """What this rank writes of its piece: all, or an even share where every rank holds the same one."""
    length = shard.stop - shard.start
    if not shard.replicated:
        return 0, length
    return length * rank // world_size, length * (rank + 1) // world_size


def optimizer_tensor_kinds(engine: Engine) -> list[str]:
    """Names of the per-parameter optimizer tensors; empty before the first step.

    For AdamW exp_avg and exp_avg_sq; with Muon momentum_buffer too, and each parameter has either kind.
    """
    states = engine.base_optimizer.state.items()
    return sorted({kind for flat, state in states for kind in _state_tensors(flat, state)})


def _state_tensors(flat: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    """What in the optimizer's state of a tensor is laid out like the tensor."""
    return {
        kind: value
        for kind, value in state.items()
        if isinstance(value, Tensor) and value.shape == flat.shape and value.dim() > 0
    }


def optimizer_scalars(engine: Engine) -> dict[str, float]:
    """The optimizer's per-tensor numbers (for AdamW and Muon: step), which are the same for all tensors."""
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
        _delete(final)
    partial.rename(final)
    sync(final.parent)


def prune_checkpoints(checkpoints: Path, config: CheckpointConfig) -> None:
    """Deletes all but the newest `keep_last` checkpoints and the multiples of `keep_every`. For rank 0.

    No checkpoint is newer than the one just saved: those were set aside at the start. A folder that cannot be deleted
    (one that is being read on a network disk, say) is only reported.
    """
    for step, path in list_checkpoints(checkpoints)[: -config.keep_last]:
        if config.keep_every is None or step % config.keep_every:
            try:
                _delete(path)
            except OSError as error:
                log.warning("the old checkpoint %s could not be deleted: %s", path, error)


def _delete(checkpoint: Path) -> None:
    """Renames first, so that a kill while deleting never leaves half a checkpoint under its name."""
    doomed = checkpoint.with_name(checkpoint.name + ".old" + PARTIAL_SUFFIX)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def clean_leftovers(checkpoints: Path) -> None:
    """Deletes what killed saves left behind. For rank 0, before the first save."""
    for path in checkpoints.glob(f"*{PARTIAL_SUFFIX}"):
        log.info("removing %s, left by a save that did not finish", path)
        shutil.rmtree(path, ignore_errors=True)


def set_newer_aside(checkpoints: Path, step: int) -> None:
    """Renames checkpoints beyond the step that the run starts from: damaged ones, or of a branch given up. For rank 0.

    Otherwise pruning would keep them instead of the run's own, and the next start would take them up.
    """
    for newer, path in list_checkpoints(checkpoints):
        if newer > step:
            aside = path.with_name(path.name + ASIDE_SUFFIX)
            number = 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}{ASIDE_SUFFIX}_{number}")
            path.rename(aside)
            log.warning("%s is beyond the start at step %d; it is now %s", path, step, aside.name)


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
    chosen = newest_good(candidates, rank, world_size)
    if chosen is None and candidates:
        raise SharedError(
            f"{checkpoints}: all {len(candidates)} checkpoints are damaged; "
            "restore one, or move the folder away to start afresh"
        )
    return chosen


def newest_good(candidates: Sequence[Path], rank: int, world_size: int) -> Path | None:
    """The first that verifies; damaged ones before it are named. Ranks share the verification. Collective."""
    for candidate in candidates:
        faults = _shared_faults(candidate, rank, world_size)
        if not faults:
            return candidate
        for fault in faults:
            log.warning("damaged checkpoint, trying the next older one: %s", fault)
    return None


def _shared_faults(checkpoint: Path, rank: int, world_size: int) -> list[str]:
    return list(dict.fromkeys(fault for part in share(find_faults(checkpoint, rank, world_size)) for fault in part))


def restore(engine: Engine, checkpoint: Path, weights_only: bool = False) -> None:
    """Loads masters, optimizer state and random states, at any ZeRO stage and number of ranks. Collective.

    Args:
        weights_only: only the master weights, for `run.init_from`.

    Raises:
        SharedError: the parameters differ from the model's (every difference is named), or a file cannot be read.
    """
    on_all_ranks(lambda: _read_shards(engine, checkpoint, weights_only))
    engine.publish_masters()
    if not weights_only:
        engine.load_policy(*on_all_ranks(lambda: _read_policy(checkpoint)))


def _read_policy(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with CheckpointReader(checkpoint) as reader:
        return reader.state.policy_state, reader.read_rank_tensors(0, _POLICY)


def _read_shards(engine: Engine, checkpoint: Path, weights_only: bool) -> None:
    with CheckpointReader(checkpoint) as reader:
        mismatches = list(parameter_mismatches(reader.state.parameters, engine.parameter_shapes()))
        if mismatches:
            raise RunError(f"{checkpoint} does not fit the model: {'; '.join(mismatches)}")
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
