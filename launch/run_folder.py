"""A run's folder: its files, whether a run may use it, and the completion marker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import differences, read_yaml, write_yaml
from configs.schema import Config
from launch.checkpoint_files import list_checkpoints, write_json
from launch.errors import RunError

# A resumed run must have the same model and the same order of the same data; all else may change, and the configuration
# wins. A source may move to another path: its content is compared with the checkpoint's fingerprint.
_FIXED_KEYS = ("model.", "run.seed", "data.seq_len", "data.sources")
_UNIMPORTANT_KEYS = ("run.resume", "run.name", "run.dir")
_LOG_NAMES = frozenset({"log.txt"})


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files described in the README."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        assert config.run.name is not None
        return cls(Path(config.run.dir) / config.run.name)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def done(self) -> Path:
        return self.path / "DONE"

    def log(self, rank: int) -> Path:
        return self.path / ("log.txt" if rank == 0 else f"rank_{rank}.log")


def open_run_folder(folder: RunFolder, config: Config) -> list[str]:
    """Makes the folder or checks that this configuration may go on in it. For rank 0.

    Returns:
        One line for every key whose value changed since the run was last started.

    Raises:
        RunError: the folder cannot be written, holds something else, a run with another model or data, or any run
            while `run.resume` is `never`.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"run.dir: the run's folder {folder.path} cannot be made: {error}") from None
    changed: list[tuple[str, Any, Any]] = []
    if folder.config.exists():
        old = read_yaml(folder.config)
        _refuse_other_run(folder, config, old)
        changed = list(differences(old, config.model_dump(mode="json")))
    elif stray := sorted(path.name for path in folder.path.iterdir() if path.name not in _LOG_NAMES):
        raise RunError(f"{folder.path}: is not a run's folder, it holds {stray[0]}; choose another run.name or run.dir")
    write_yaml(config, folder.config)
    return [f"{key}: {old} -> {new}" for key, old, new in changed if key not in _UNIMPORTANT_KEYS]


def fixed_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What makes `new` another run than `old`, both plain trees of a configuration: a text for each key."""
    old, new = _without_source_paths(old), _without_source_paths(new)
    return [
        f"{key} was {before} and is now {after}"
        for key, before, after in differences(old, new)
        if key.startswith(_FIXED_KEYS)
    ]


def _without_source_paths(tree: dict[str, Any]) -> dict[str, Any]:
    sources = [{"weight": source.get("weight")} for source in tree.get("data", {}).get("sources", [])]
    return {**tree, "data": {**tree.get("data", {}), "sources": sources}}


def _refuse_other_run(folder: RunFolder, config: Config, old: dict[str, Any]) -> None:
    if config.run.resume == "never" and folder.metrics.exists():
        raise RunError(
            f"run.resume=never, but {folder.path} already holds a run; choose another run.name, "
            "move the folder away, or set run.resume=auto to go on"
        )
    fixed = fixed_differences(old, config.model_dump(mode="json"))
    if fixed and list_checkpoints(folder.checkpoints):
        raise RunError(
            f"{folder.path} holds a run with another model or data: {'; '.join(fixed)}. "
            "Choose another run.name, or set run.init_from there to start from its weights"
        )


def finished_step(folder: RunFolder) -> int | None:
    """The last step that the completion marker names; None when there is no (readable) marker."""
    try:
        return int(json.loads(folder.done.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mark_done(folder: RunFolder, step: int, loss: float) -> None:
    """Writes the completion marker. For rank 0, after the last checkpoint."""
    write_json(folder.done, {"step": step, "loss": loss})
