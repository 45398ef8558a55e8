"""Decides where a run starts: checks the folder and the checkpoint before anything is changed.

`configs.resume` defines what each value of `run.resume` allows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import ConfigError
from configs.load import differences, load_config, to_yaml
from configs.resume import named_checkpoint, refuses_existing_run, resumes_newest, stays_finished
from configs.schema import Config
from data.files import write_file
from data.skips import SkippedSamples
from launch.checkpoint.files import (
    CONFIG,
    TrainingState,
    find_checkpoint,
    find_faults,
    read_config,
    read_state,
)
from launch.checkpoint.verify import newest_undamaged, shared_faults
from launch.distributed.collective import on_main_rank
from launch.distributed.topology import Topology
from launch.errors import RunError, SharedError
from launch.run_folder.checkpoints import list_checkpoints
from launch.run_folder.folder import RunFolder
from launch.run_folder.observe import done_step
from launch.training.data import TrainingData, past_phases, sequence_length

log = logging.getLogger(__name__)

# A resumed run must have the same model and the same data in the same order. Everything else may change, and the new
# configuration applies. A source may move to another path, since its fingerprint is compared with the checkpoint's.
_FIXED_KEYS = ("model.", "run.seed", "data.seq_len", "data.sources")
_UNIMPORTANT_KEYS = ("run.resume", "run.name", "run.dir")


def check_folder(folder: RunFolder, config: Config) -> None:
    """Checks that this configuration may start or resume in a folder; changes nothing. For rank 0.

    Raises:
        RunError: The folder holds a run with another model or data, or any run if `run.resume` is `never`.
    """
    has_checkpoints = bool(list_checkpoints(folder.checkpoints))
    if refuses_existing_run(config.run.resume) and (has_checkpoints or folder.metrics.exists()):
        raise RunError(
            f"run.resume={config.run.resume}, but {folder.path} already holds a run; choose another run.name, "
            "move the folder away, or set run.resume=auto to resume"
        )
    fixed = fixed_differences(previous_configuration(folder), config.model_dump(mode="json"))
    if fixed and has_checkpoints:
        raise RunError(
            f"{folder.path} holds a run with another model or data: {'; '.join(fixed)}. "
            "Choose another run.name, or set run.init_from there to start from its weights"
        )


def previous_configuration(folder: RunFolder) -> dict[str, Any]:
    """Returns the configuration of the folder's last start as a plain tree; empty if there was none.

    If the folder's config.yaml is missing or damaged, the newest readable one of a checkpoint is used.
    """
    for path in (folder.config, *(path / CONFIG for _, path in reversed(list_checkpoints(folder.checkpoints)))):
        try:
            # Loaded through the schema, so that keys of a newer version have their defaults.
            return load_config(path).model_dump(mode="json")
        except ConfigError:
            continue
    return {}


def fixed_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describes each change from `old` to `new`, both plain trees, that a resumed run may not have."""
    if not old:
        return []
    old, new = _without_source_paths(old), _without_source_paths(new)
    return [
        f"{key} was {before} and is now {after}"
        for key, before, after in differences(old, new)
        if key.startswith(_FIXED_KEYS)
    ]


def record_start(folder: RunFolder, config: Config, before: Config | None) -> list[str]:
    """Writes the configuration and removes an old completion marker. For rank 0, once the start can no longer fail.

    Args:
        before: The configuration in the checkpoint that the run resumes from; None if it does not resume.

    Returns:
        One line for every key whose value changed since then, or else since the run was last started.
    """
    old = before.model_dump(mode="json") if before else previous_configuration(folder)
    new = config.model_dump(mode="json")
    write_file(folder.config, to_yaml(config).encode())
    folder.done.unlink(missing_ok=True)
    changes = differences(old, new) if old else ()
    return [f"{key}: {before} -> {after}" for key, before, after in changes if key not in _UNIMPORTANT_KEYS]


def _without_source_paths(tree: dict[str, Any]) -> dict[str, Any]:
    data = tree.get("data") or {}
    sources = [{"weight": source.get("weight")} for source in data.get("sources", [])]
    return {**tree, "data": {**data, "sources": sources}}


def choose_checkpoint(resume: str, checkpoints: Path, rank: int, world_size: int) -> Path | None:
    """Returns the checkpoint to resume from, verified, or None to start at step 0. Collective.

    The ranks share the verification. With `auto`, damage is logged and the next older checkpoint is tried.

    Raises:
        SharedError: The named checkpoint does not exist or is damaged, or all of the run's are damaged.
    """
    path = named_checkpoint(resume)
    if path is not None:
        named = on_main_rank(lambda: find_checkpoint(path))
        faults = shared_faults(named, rank, world_size)
        if faults:
            raise SharedError(f"run.resume: {named} is damaged: {'; '.join(faults)}")
        return named
    if not resumes_newest(resume):
        return None
    candidates = on_main_rank(lambda: [path for _, path in reversed(list_checkpoints(checkpoints))])
    chosen = newest_undamaged(candidates, rank, world_size)
    if chosen is None and candidates:
        raise SharedError(
            f"{checkpoints}: all {len(candidates)} checkpoints are damaged; "
            "restore one, or move the folder away to start from scratch"
        )
    return chosen


@dataclass(frozen=True)
class Start:
    """The starting point of a run.

    Attributes:
        checkpoint: The checkpoint to resume from, or whose weights to load; None for initial weights.
        state: The state of the checkpoint to resume from; None at step 0.
        skipped: The samples of the data order that the run skips.
    """

    checkpoint: Path | None = None
    state: TrainingState | None = None
    skipped: SkippedSamples = field(default_factory=SkippedSamples)

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.state.step if self.state else 0


def choose_start(config: Config, folder: RunFolder, data: TrainingData, topology: Topology) -> Start:
    """Finds and checks the checkpoint for `run.resume` and `run.init_from`; changes nothing. Collective.

    Raises:
        SharedError: A requested checkpoint cannot be used.
    """
    chosen = choose_checkpoint(config.run.resume, folder.checkpoints, topology.rank, topology.world_size)
    if chosen is not None:
        return on_main_rank(lambda: _checked_resume(chosen, config, data))
    if config.run.init_from is not None:
        path = Path(config.run.init_from)
        return on_main_rank(lambda: _checked_weights(path, data))
    return Start()


def is_finished(folder: RunFolder, config: Config) -> bool:
    """Whether the run has already finished and `run.resume` does not restart it from a checkpoint. Collective."""
    finished = on_main_rank(lambda: done_step(folder.path))
    if not stays_finished(config.run.resume) or finished is None or finished < config.train.last_step:
        return False
    log.info("%s is finished (step %d); nothing to do", folder.path, finished)
    return True


def _checked_resume(checkpoint: Path, config: Config, data: TrainingData) -> Start:
    state = read_state(checkpoint)
    _check_tokenizer(checkpoint, state, data)
    saved_config = read_config(checkpoint)
    problems = fixed_differences(saved_config.model_dump(mode="json"), config.model_dump(mode="json"))
    num_first = len(config.data.sources)  # sources of later phases may change until they are used
    for key, source, ours, saved in zip(
        data.source_keys[:num_first], data.sources, data.fingerprints, state.data_fingerprints, strict=False
    ):
        if saved != ours:
            problems.append(f"{key}: {source.path} differs from the data that the run was trained on")
    skipped = SkippedSamples.of(state.skipped_samples)
    reached = int(skipped.places(np.array(state.consumed_samples)))
    before = past_phases(saved_config, state.data_fingerprints, reached)
    after = past_phases(config, data.fingerprints, reached)
    if before != after:
        problems.append(
            f"data.phases: for the first {reached * sequence_length(config):,} tokens, the run used: "
            f"{'; '.join(before) or 'no phases'}; now configured: {'; '.join(after) or 'no phases'}; only phases that "
            "begin later may change"
        )
    if problems:
        raise RunError(
            f"{checkpoint} belongs to a run with another model or data: {'; '.join(problems)}. "
            "To start a new run from its weights, set run.init_from instead"
        )
    saved_optimizer = saved_config.optim.name
    if saved_optimizer != config.optim.name:
        raise RunError(
            f"{checkpoint} holds the state of optim.name={saved_optimizer}, which optim.name={config.optim.name} "
            f"cannot use. Set optim.name={saved_optimizer} to resume, or start a new run (another run.name) "
            f"from its weights with run.init_from={checkpoint}"
        )
    if state.step > config.train.last_step:
        raise RunError(
            f"{checkpoint} is at step {state.step}, beyond the last step {config.train.last_step} "
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
    """Raises RunError if token ids have another meaning in the data than in the checkpoint."""
    saved, wanted = state.tokenizer_sha256, data.tokenizer_sha256
    if saved is not None and wanted is not None and saved != wanted:
        raise RunError(
            f"data.sources: the shards were made with another tokenizer ({wanted[:12]}…) than the data of "
            f"{checkpoint} ({saved[:12]}…); prepare them with --tokenizer {checkpoint / (state.tokenizer_file or '')}"
        )
