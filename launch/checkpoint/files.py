"""A checkpoint on disk: its files, their verification, and reading any range of any parameter.

    step_00001000/
      manifest.json            every other file with its size and hash; written last
      state.json               step, data position, parameters with shapes, optimizer scalars
      config.yaml              the resolved configuration
      tokenizer…               the tokenizer's file, if the data has one
      rank_00000.safetensors   one rank's shards, 1-D fp32: `master/NAME`, `exp_avg/NAME`, …; the file's metadata
                               holds each shard's range in the flattened parameter

The shards of all ranks together cover every parameter exactly once, so that any number of ranks at any ZeRO stage can
read the ranges that it needs. Nothing is pickled, and no process group is needed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.load import load_config
from configs.schema import Config
from data.files import hash_file, write_file
from launch.errors import RunError
from launch.run_folder.checkpoints import list_checkpoints

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
MASTER = "master"
POLICY_PREFIX = "policy/"  # of a query/key policy's tensors in rank 0's file


@dataclass(frozen=True)
class TrainingState:
    """The content of state.json: everything in a checkpoint except tensors and configuration.

    Attributes:
        step: The number of finished optimizer steps.
        consumed_samples: The number of samples that those steps used.
        skipped_samples: The ranges of the data order that the run skips; see `data.skips`.
        num_ranks, zero_stage: The layout of the run that saved the checkpoint.
        parameters: Parameter name -> shape.
        groups: Optimizer group -> parameter names.
        optimizer_tensors: The kinds of per-parameter optimizer tensors, e.g. exp_avg; a parameter may lack some.
        optimizer_scalars: The optimizer's scalars, e.g. AdamW's step.
        policy_state: The state of a per-head query/key policy; see `launch.attention_control.control`.
        data_fingerprints: The fingerprint of every source; see `launch.training.data.fingerprint`.
        tokenizer_sha256, tokenizer_file: The hash of the data's tokenizer, and its file's name in this folder.
        loss: The training loss of the last step with a finite loss.
        val_losses: The latest validation loss of each set.
        step_figures: The loss and gradient norm of recent steps; see `launch.engine.anomalies`.
    """

    step: int
    consumed_samples: int
    num_ranks: int
    zero_stage: int
    parameters: dict[str, list[int]]
    groups: dict[str, list[str]]
    optimizer_tensors: list[str]
    optimizer_scalars: dict[str, float]
    data_fingerprints: list[str]
    tokenizer_sha256: str | None
    tokenizer_file: str | None
    loss: float
    val_losses: dict[str, float] = field(default_factory=dict)
    policy_state: dict[str, Any] = field(default_factory=dict)
    step_figures: dict[str, list[float]] = field(default_factory=dict)
    skipped_samples: list[list[int]] = field(default_factory=list)
    format_version: int = FORMAT_VERSION


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint at a path: a checkpoint's folder, or the newest checkpoint in a run's folder.

    Raises:
        RunError: There is none at that path.
    """
    if not path.exists():
        raise RunError(f"{path}: no such checkpoint or run folder")
    if (path / MANIFEST).is_file():
        return path
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise RunError(f"{path}: no checkpoint found (expected {MANIFEST}, or a run's folder with checkpoints/step_…)")
    return found[-1][1]


def file_entry(path: Path) -> dict[str, Any]:
    """The size and xxh3 hash of a file, as listed in the manifest."""
    return {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}


def find_faults(checkpoint: Path, part: int = 0, num_parts: int = 1, check_hashes: bool = True) -> list[str]:
    """Returns one line for every missing or damaged file of a checkpoint; none if it is undamaged.

    Args:
        part, num_parts: Check every num_parts-th file starting at `part`, so that ranks can share the work.
        check_hashes: Read and hash every file; otherwise only sizes are compared.
    """
    try:
        files = _read_manifest(checkpoint)
    except RunError as error:
        return [str(error)]
    faults = []
    for name in sorted(files)[part::num_parts]:
        path, expected = checkpoint / name, files[name]
        try:
            if not path.is_file():
                faults.append(f"{path}: is missing")
            elif path.stat().st_size != expected["bytes"]:
                faults.append(f"{path}: has {path.stat().st_size} bytes, expected {expected['bytes']}")
            elif check_hashes and file_entry(path) != expected:
                faults.append(f"{path}: its content does not match its hash; the file is damaged")
        except OSError as error:
            faults.append(f"{path}: cannot be read: {error}")
    return faults


def _read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """File name -> size and hash. Raises RunError if the manifest is unreadable or not a checkpoint's."""
    path = checkpoint / MANIFEST
    content = _read_json(path)
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not {STATE, CONFIG, rank_file(0)} <= files.keys():
        raise RunError(f"{path}: does not list the files of a checkpoint")
    for name, entry in files.items():
        if not isinstance(entry, dict) or not {"bytes", "xxh3_128"} <= entry.keys():
            raise RunError(f"{path}: the entry of {name} has no size and hash")
    return files


def read_state(checkpoint: Path) -> TrainingState:
    """Reads state.json. Raises RunError if it cannot be read or has another format version."""
    values = _read_json(checkpoint / STATE)
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise RunError(f"{checkpoint / STATE}: has format version {version!r}; expected {FORMAT_VERSION}")
    try:
        return TrainingState(**values)
    except TypeError as error:
        raise RunError(f"{checkpoint / STATE}: is not a checkpoint's state: {error}") from None


def write_state(checkpoint: Path, state: TrainingState) -> None:
    """Writes state.json and syncs it to disk."""
    write_file(checkpoint / STATE, json.dumps(asdict(state), indent=1).encode())


def read_config(checkpoint: Path) -> Config:
    """Reads the resolved configuration of the run that saved the checkpoint."""
    return load_config(checkpoint / CONFIG)


def rank_file(rank: int) -> str:
    """The name of one rank's file."""
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class _SavedShard:
    """Elements [start, stop) of a flattened tensor, in one rank's file."""

    start: int
    stop: int
    reader: Any  # an open safetensors file
    key: str


class CheckpointReader:
    """Reads ranges of parameters and optimizer tensors from all ranks' files. A context manager."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises RunError if the files cannot be read."""
        self.path = checkpoint
        self.state = read_state(checkpoint)
        self._stack = contextlib.ExitStack()
        self._shards: dict[str, list[_SavedShard]] = {}
        for rank in range(self.state.num_ranks):
            path = checkpoint / rank_file(rank)
            try:
                reader = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise RunError(f"{path}: cannot be read: {error}") from None
            ranges = json.loads((reader.metadata() or {}).get("ranges", "{}"))
            present = set(reader.keys())
            for name, (start, stop) in ranges.items():
                for key in (f"{kind}/{name}" for kind in (MASTER, *self.state.optimizer_tensors)):
                    if key in present:
                        self._shards.setdefault(key, []).append(_SavedShard(start, stop, reader, key))

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def optimizer_tensors(self, name: str) -> list[str]:
        """The kinds of optimizer tensors that a parameter has; none if the checkpoint precedes the first step.

        Raises:
            RunError: This parameter has none, but others do.
        """
        kinds = [kind for kind in self.state.optimizer_tensors if f"{kind}/{name}" in self._shards]
        if self.state.optimizer_tensors and not kinds:
            raise RunError(f"{self.path}: has no optimizer state for {name}")
        return kinds

    def read_range(self, kind: str, name: str, out: Tensor, start: int) -> None:
        """Fills the 1-D `out` with elements [start, start + len(out)) of a parameter's flattened tensor `kind`.

        Raises:
            RunError: The shards do not cover the range.
        """
        stop, filled = start + out.numel(), 0
        for shard in self._shards.get(f"{kind}/{name}", ()):
            first, last = max(start, shard.start), min(stop, shard.stop)
            if first < last:
                part = shard.reader.get_slice(shard.key)[first - shard.start : last - shard.start]
                out[first - start : last - start].copy_(part)
                filled += last - first
        if filled != out.numel():
            raise RunError(f"{self.path}: {kind} of {name} has {filled} of the {out.numel()} elements needed")

    def read_parameter(self, name: str) -> Tensor:
        """Reads the whole fp32 master of a parameter."""
        shape = self.state.parameters[name]
        out = torch.empty(int(torch.Size(shape).numel()), dtype=torch.float32)
        self.read_range(MASTER, name, out, 0)
        return out.view(shape)

    def read_rank_tensor(self, rank: int, key: str) -> Tensor | None:
        """Reads a tensor of one rank's file that belongs to no parameter (e.g. `rng/cpu`); None if it is absent."""
        with safe_open(self.path / rank_file(rank), framework="pt") as reader:
            return reader.get_tensor(key) if key in reader.keys() else None  # noqa: SIM118 - not a mapping

    def read_rank_tensors(self, rank: int, prefix: str) -> dict[str, Tensor]:
        """Reads all tensors of one rank's file with a prefix; the keys of the result omit it."""
        with safe_open(self.path / rank_file(rank), framework="pt") as reader:
            names = [key for key in reader.keys() if key.startswith(prefix)]  # noqa: SIM118 - not a mapping
            return {name.removeprefix(prefix): reader.get_tensor(name) for name in names}


def parameter_mismatches(saved: Mapping[str, list[int]], wanted: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yields one line for every parameter that is missing, unexpected or of another shape."""
    for name, shape in wanted.items():
        if name not in saved:
            yield f"{name}: missing in the checkpoint"
        elif list(shape) != saved[name]:
            yield f"{name}: shape {saved[name]} in the checkpoint, {list(shape)} in the model"
    for name in saved:
        if name not in wanted:
            yield f"{name}: missing in the model"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None
