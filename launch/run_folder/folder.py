"""The files of a run's folder, and the completion marker."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from data.files import write_file

_RANK_FILE = re.compile(r"^(rank_\d+\.log|stacks_rank_\d+\.txt)$")
_OWN_NAMES = frozenset(
    {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "profile", "bad_batches", "DONE", "lock", "log.txt"}
)


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's files, which are described in docs/monitoring.md."""

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


def mark_done(folder: RunFolder, step: int, loss: float) -> None:
    """Writes the completion marker. For rank 0, after the last checkpoint."""
    write_file(folder.done, json.dumps({"step": step, "loss": loss}).encode())


def is_own_file(name: str) -> bool:
    """Whether a run writes a file or folder with this name."""
    return name in _OWN_NAMES or name.endswith(".tmp") or _RANK_FILE.match(name) is not None
