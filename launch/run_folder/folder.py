"""A run's folder: its files, whether a run may use it, and the completion marker."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.load import differences, load_config, to_yaml
from configs.schema import Config
from data.files import write_file
from launch.checkpoint.files import CONFIG, list_checkpoints
from launch.errors import RunError
from launch.run_folder.observe import done_step

# A resumed run must have the same model and the same order of the same data; all else may change, and the configuration
# wins. A source may move to another path: its content is compared with the checkpoint's fingerprint.
_FIXED_KEYS = ("model.", "run.seed", "data.seq_len", "data.sources")
_UNIMPORTANT_KEYS = ("run.resume", "run.name", "run.dir")
_RANK_FILE = re.compile(r"^(rank_\d+\.log|stacks_rank_\d+\.txt)$")
_OWN_NAMES = frozenset(
    {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "profile", "bad_batches", "DONE", "lock", "log.txt"}
)


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
    def bad_batches(self) -> Path:
        return self.path / "bad_batches"

    @property
    def done(self) -> Path:
        return self.path / "DONE"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def log(self, rank: int) -> Path:
        return self.path / ("log.txt" if rank == 0 else f"rank_{rank}.log")


class FolderLock:
    """Keeps a second run out of a folder for as long as the process holds it. For rank 0."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Makes the folder if need be and locks it.

        Raises:
            RunError: the folder cannot be made, is not a run's, or another process is training in it.
        """
        path = self._folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            stray = sorted(entry.name for entry in path.iterdir() if not _is_own(entry.name))
        except OSError as error:
            raise RunError(f"run.dir: the run's folder {path} cannot be made: {error}") from None
        if stray and not self._folder.config.exists():
            raise RunError(f"{path}: is not a run's folder, it holds {stray[0]}; choose another run.name or run.dir")
        descriptor = os.open(self._folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunError(f"{path}: another run is training in it ({holder}); choose another run.name") from None
            return  # a file system without locks
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets other runs in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def released_at_end(lock: FolderLock) -> Iterator[None]:
    """Releases the lock after a block."""
    try:
        yield
    finally:
        lock.release()


def check_folder(folder: RunFolder, config: Config) -> None:
    """Whether this configuration may start or go on in a folder; changes nothing. For rank 0.

    Raises:
        RunError: the folder holds a run with another model or data, or any run while `run.resume` is `never`.
    """
    has_checkpoints = bool(list_checkpoints(folder.checkpoints))
    if config.run.resume == "never" and (has_checkpoints or folder.metrics.exists()):
        raise RunError(
            f"run.resume=never, but {folder.path} already holds a run; choose another run.name, "
            "move the folder away, or set run.resume=auto to go on"
        )
    fixed = fixed_differences(previous_configuration(folder), config.model_dump(mode="json"))
    if fixed and has_checkpoints:
        raise RunError(
            f"{folder.path} holds a run with another model or data: {'; '.join(fixed)}. "
            "Choose another run.name, or set run.init_from there to start from its weights"
        )


def previous_configuration(folder: RunFolder) -> dict[str, Any]:
    """The configuration of the folder's last start as a plain tree; empty when there was none.

    Where the folder's own file is gone or damaged, the newest checkpoint's is taken.
    """
    for path in (folder.config, *(path / CONFIG for _, path in reversed(list_checkpoints(folder.checkpoints)))):
        try:
            # Through the schema, so that keys which came with a newer version have their defaults.
            return load_config(path).model_dump(mode="json")
        except ConfigError:
            continue
    return {}


def fixed_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What makes `new` another run than `old`, both plain trees of a configuration: a text for each key."""
    if not old:
        return []
    old, new = _without_source_paths(old), _without_source_paths(new)
    return [
        f"{key} was {before} and is now {after}"
        for key, before, after in differences(old, new)
        if key.startswith(_FIXED_KEYS)
    ]


def begin_run(folder: RunFolder, config: Config, before: Config | None) -> list[str]:
    """Writes the configuration and removes an old completion marker. For rank 0, once the start cannot fail any more.

    Args:
        before: of the checkpoint that the run goes on from; None: there is none.

    Returns:
        One line for every key whose value changed since then, or else since the run was last started.
    """
    old = before.model_dump(mode="json") if before else previous_configuration(folder)
    new = config.model_dump(mode="json")
    write_file(folder.config, to_yaml(config).encode())
    folder.done.unlink(missing_ok=True)
    changes = differences(old, new) if old else ()
    return [f"{key}: {before} -> {after}" for key, before, after in changes if key not in _UNIMPORTANT_KEYS]


def finished_step(folder: RunFolder) -> int | None:
    """The last step that the completion marker names; None when there is no (readable) marker."""
    return done_step(folder.path)


def mark_done(folder: RunFolder, step: int, loss: float) -> None:
    """Writes the completion marker. For rank 0, after the last checkpoint."""
    write_file(folder.done, json.dumps({"step": step, "loss": loss}).encode())


def _is_own(name: str) -> bool:
    return name in _OWN_NAMES or name.endswith(".tmp") or _RANK_FILE.match(name) is not None


def _without_source_paths(tree: dict[str, Any]) -> dict[str, Any]:
    data = tree.get("data") or {}
    sources = [{"weight": source.get("weight")} for source in data.get("sources", [])]
    return {**tree, "data": {**data, "sources": sources}}
