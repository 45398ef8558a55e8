"""What happens once before the steps: where the run starts from, and what is said about it."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from configs.schema import Config
from data.loader import BatchGeometry
from data.skips import SkippedSamples
from launch.checkpoint.files import (
    TrainingState,
    find_checkpoint,
    find_faults,
    list_checkpoints,
    read_config,
    read_state,
)
from launch.checkpoint.save import choose_checkpoint, clean_leftovers, newest_good, restore, set_newer_aside
from launch.distributed.collective import on_main_rank
from launch.distributed.topology import Topology
from launch.engine.engine import Engine
from launch.errors import RunError, SharedError
from launch.run_folder.folder import RunFolder, begin_run, finished_step, fixed_differences
from launch.training.data import TrainingData, describe_data, past_phases, sequence_length

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Where a run starts from.

    Attributes:
        checkpoint: to go on from, or to take the weights of; None: initial weights.
        state: of the checkpoint to go on from; None at step 0.
        skipped: what the run leaves out of the data order.
    """

    checkpoint: Path | None = None
    state: TrainingState | None = None
    skipped: SkippedSamples = field(default_factory=SkippedSamples)

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.state.step if self.state else 0


@dataclass(frozen=True)
class Rollback:
    """A step at fault, from which the run is to go back to its last checkpoint.

    Attributes:
        step: number of the step.
        consumed_samples: of the run, with those of the step.
        skipped: what the run left out up to then.
        reason: what is wrong, in one line.
    """

    step: int
    consumed_samples: int
    skipped: SkippedSamples
    reason: str


def last_step(config: Config) -> int:
    """The step after which this start ends."""
    return config.train.stop_step or config.train.steps


def choose_start(config: Config, folder: RunFolder, data: TrainingData, topology: Topology) -> Start:
    """Finds and checks what `run.resume` and `run.init_from` ask for; changes nothing. Collective.

    Raises:
        SharedError: a checkpoint that was asked for cannot be used.
    """
    chosen = choose_checkpoint(config.run.resume, folder.checkpoints, topology.rank, topology.world_size)
    if chosen is not None:
        return on_main_rank(lambda: _checked_resume(chosen, config, data))
    if config.run.init_from is not None:
        path = Path(config.run.init_from)
        return on_main_rank(lambda: _checked_weights(path, data))
    return Start()


def roll_back(
    rollback: Rollback,
    first_start: Start,
    config: Config,
    folder: RunFolder,
    topology: Topology,
    taken: Counter[Path | None],
) -> Start:
    """The last checkpoint of this run that verifies, or the run's beginning before the first. Collective.

    The samples from there to the bad step, this included, are left out from now on.

    Args:
        first_start: of this process.
        taken: how often the run has gone back to each checkpoint; counted up.

    Raises:
        SharedError: all are damaged, or it has gone back to the same one too often.
    """
    gc.collect()  # the engine that was given up; its memory is needed for the next one
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    candidates = on_main_rank(lambda: _own_checkpoints(first_start, folder))
    checkpoint = newest_good(candidates, topology.rank, topology.world_size)
    begins_again = checkpoint is None and not candidates and first_start.state is None
    if begins_again and first_start.checkpoint is not None:
        begins_again = newest_good([first_start.checkpoint], topology.rank, topology.world_size) is not None
    if checkpoint is None and not begins_again:
        raise SharedError(f"{rollback.reason}; there is no undamaged checkpoint to go back to")
    where = checkpoint or "the start of the run"
    if taken[checkpoint] == config.train.max_rollbacks:
        raise SharedError(
            f"{rollback.reason}; the run has gone back to {where} {taken[checkpoint]} times already "
            "(train.max_rollbacks)"
        )
    taken[checkpoint] += 1
    start = first_start
    if checkpoint is not None:
        start = Start(checkpoint, on_main_rank(lambda: read_state(checkpoint)))
    consumed_samples = start.state.consumed_samples if start.state else 0
    edges = rollback.skipped.places(np.array([consumed_samples, rollback.consumed_samples - 1]))
    first, last = edges.tolist()
    log.warning(
        "going back to %s (rollback %d of at most %d to there); the %d samples from there to step %d are left out",
        where,
        taken[checkpoint],
        config.train.max_rollbacks,
        rollback.consumed_samples - consumed_samples,
        rollback.step,
    )
    return replace(start, skipped=rollback.skipped.and_range(first, last + 1))


def _own_checkpoints(first_start: Start, folder: RunFolder) -> list[Path]:
    """The checkpoints that lead to where the run is, newest first. The folder may hold another branch's beside them."""
    saved = list(reversed(list_checkpoints(folder.checkpoints)))
    if first_start.state is None:
        return [path for _, path in saved]
    assert first_start.checkpoint is not None
    if first_start.checkpoint.resolve().parent == folder.checkpoints.resolve():
        return [path for _, path in saved]
    return [*(path for step, path in saved if step > first_start.step), first_start.checkpoint]


def is_finished(folder: RunFolder, config: Config) -> bool:
    """Whether the run has already reached its last step and is not sent back by `run.resume`. Collective."""
    finished = on_main_rank(lambda: finished_step(folder))
    if config.run.resume != "auto" or finished is None or finished < last_step(config):
        return False
    log.info("%s is finished (step %d); nothing to do", folder.path, finished)
    return True


def load_start(engine: Engine, start: Start, folder: RunFolder, config: Config) -> None:
    """Loads the weights (and all else when going on), and makes the folder this run's. Collective."""
    if start.checkpoint is not None:
        restore(engine, start.checkpoint, weights_only=start.state is None)
    changes = on_main_rank(lambda: _take_over(folder, config, start))
    for change in changes:
        log.info("configuration changed since %s: %s", "the checkpoint" if start.state else "the last start", change)
    if start.state is not None:
        log.info("going on from %s at step %d", start.checkpoint, start.step)
    elif start.checkpoint is not None:
        log.info("starting from the weights of %s", start.checkpoint)


def announce(
    config: Config, data: TrainingData, geometry: BatchGeometry, topology: Topology, device: torch.device
) -> None:
    """Says what is about to run."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    log.info(
        "run %s: %d rank%s on %s, ZeRO stage %d, %s",
        RunFolder.of(config).path,
        topology.world_size,
        "s" if topology.world_size > 1 else "",
        accelerator,
        config.deepspeed.zero_stage,
        config.train.precision,
    )
    for line in [*describe_data(data, config), describe_batch(config, geometry)]:
        log.info("%s", line)


def describe_batch(config: Config, geometry: BatchGeometry) -> str:
    """The batch arithmetic in one line."""
    slots = geometry.world_size * geometry.micro_batch_size * geometry.accumulation
    empty = slots - geometry.samples_per_step
    return (
        f"batch: {config.train.global_batch_tokens:,} tokens = {geometry.samples_per_step} sequences of "
        f"{config.data.seq_len} = {geometry.world_size} ranks x {geometry.micro_batch_size} sequences x "
        f"{geometry.accumulation} accumulation steps" + (f", {empty} of them empty" if empty else "")
    )


def _checked_resume(checkpoint: Path, config: Config, data: TrainingData) -> Start:
    state = read_state(checkpoint)
    _check_tokenizer(checkpoint, state, data)
    saved_config = read_config(checkpoint)
    problems = fixed_differences(saved_config.model_dump(mode="json"), config.model_dump(mode="json"))
    num_first = len(config.data.sources)  # those of later phases may change until they are used
    for key, source, ours, saved in zip(
        data.source_keys[:num_first], data.sources, data.fingerprints, state.data_fingerprints, strict=False
    ):
        if saved != ours:
            problems.append(f"{key}: {source.path} holds other data than the run was trained on")
    skipped = SkippedSamples.of(state.skipped_samples)
    reached = int(skipped.places(np.array(state.consumed_samples)))
    before = past_phases(saved_config, state.data_fingerprints, reached)
    after = past_phases(config, data.fingerprints, reached)
    if before != after:
        problems.append(
            f"data.phases: of the {reached * sequence_length(config):,} tokens passed so far they "
            f"decided: {'; '.join(before) or 'nothing'}; and now: {'; '.join(after) or 'nothing'}; only phases that "
            "begin later may change"
        )
    if problems:
        raise RunError(
            f"{checkpoint} is of another model or data: {'; '.join(problems)}. "
            "To start a new run from its weights, set run.init_from instead"
        )
    saved_optimizer = saved_config.optim.name
    if saved_optimizer != config.optim.name:
        raise RunError(
            f"{checkpoint} holds the state of optim.name={saved_optimizer}, which is of no use to optim.name="
            f"{config.optim.name}. Set optim.name={saved_optimizer} to go on, or start a new run (another run.name) "
            f"from its weights with run.init_from={checkpoint}"
        )
    if state.step > last_step(config):
        raise RunError(
            f"{checkpoint} is at step {state.step}, beyond the last step {last_step(config)} "
            "(train.steps, train.stop_step)"
        )
    return Start(checkpoint, state, SkippedSamples.of(state.skipped_samples))


def _checked_weights(path: Path, data: TrainingData) -> Start:
    checkpoint = find_checkpoint(path)
    faults = find_faults(checkpoint)
    if faults:
        raise RunError(f"run.init_from: {checkpoint} is damaged: {'; '.join(faults)}")
    _check_tokenizer(checkpoint, read_state(checkpoint), data)
    return Start(checkpoint)


def _check_tokenizer(checkpoint: Path, state: TrainingState, data: TrainingData) -> None:
    """Token ids must mean the same in the data as in the checkpoint."""
    saved, wanted = state.tokenizer_sha256, data.tokenizer_sha256
    if saved is not None and wanted is not None and saved != wanted:
        raise RunError(
            f"data.sources: the shards were made with another tokenizer ({wanted[:12]}…) than the data of "
            f"{checkpoint} ({saved[:12]}…); prepare them with --tokenizer {checkpoint / (state.tokenizer_file or '')}"
        )


def _take_over(folder: RunFolder, config: Config, start: Start) -> list[str]:
    """Makes the folder this run's; returns what has changed in its configuration."""
    clean_leftovers(folder.checkpoints)
    set_newer_aside(folder.checkpoints, start.step)
    before = None
    if start.state is not None and start.checkpoint is not None:
        before = read_config(start.checkpoint)
    return begin_run(folder, config, before)
