"""What a preflight compares: the code, versions, configuration, data, disk and memory that one rank sees."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import Config
from data.errors import DataError
from data.source import TokenSource
from launch import PROJECT_ROOT
from launch.distributed.process_group import local_device
from launch.distributed.topology import Topology
from launch.errors import RunError
from launch.planning.memory import checkpoint_bytes, model_sizes, plan_memory
from launch.run_folder.folder import RunFolder
from launch.training.data import fingerprint, open_data

PACKAGES = ("torch", "deepspeed", "numpy", "pydantic", "safetensors", "sentencepiece", "tokenizers", "xxhash")
_SOURCE_FOLDERS = ("configs", "data", "launch", "model")


@dataclass(frozen=True)
class Need:
    """Bytes that a run needs and that there are.

    Attributes:
        each_bytes: of one rank, or one checkpoint.
        count: ranks that share the device, or checkpoints.
        used_bytes: what the run has taken already.
        free_bytes: what is left.
    """

    each_bytes: float
    count: int
    used_bytes: float
    free_bytes: float

    @property
    def is_met(self) -> bool:
        return self.each_bytes * self.count <= self.used_bytes + self.free_bytes


@dataclass(frozen=True)
class RankFacts:
    """What one rank sees; plain values, so that they can be sent as JSON.

    Attributes:
        sources: file of the project -> hash.
        versions: package -> version.
        config: the resolved configuration as a tree; None where it cannot be read.
        data: key of a source -> hash of what it holds.
        device: name of the GPU, or "CPU".
        device_id: of the GPU, the same on no other; empty on CPU.
        memory: of the device; None where the model cannot be planned.
        disk: of the run's folder; for rank 0, None for others.
        loopback: the loopback address that this host's own name stands for, which others cannot reach; else None.
        faults: what is wrong here, whatever others see.
    """

    rank: int
    node: int
    host: str
    sources: dict[str, str]
    versions: dict[str, str]
    device: str
    device_id: str = ""
    config: dict[str, Any] | None = None
    data: dict[str, str] = field(default_factory=dict)
    memory: Need | None = None
    disk: Need | None = None
    loopback: str | None = None
    faults: tuple[str, ...] = ()

    @classmethod
    def read(cls, tree: dict[str, Any]) -> RankFacts:
        """From `asdict`'s tree, as JSON gives it back."""
        needs = {name: None if tree[name] is None else Need(**tree[name]) for name in ("memory", "disk")}
        return cls(**{**tree, **needs, "faults": tuple(tree["faults"])})


def collect_facts(topology: Topology, path: str, overrides: Sequence[str]) -> tuple[RankFacts, Config | None]:
    """What this rank sees, and its configuration where that can be read. It raises nothing that a user can cause."""
    faults: list[str] = []
    config = _attempt(lambda: load_config(path, overrides), faults)
    opened = _attempt(lambda: open_data(config), faults) if config is not None else None
    device_id = ""
    device, free_bytes, ranks_on_device = "CPU", float(psutil.virtual_memory().available), topology.local_world_size
    if torch.cuda.is_available():
        index = _attempt(lambda: local_device(topology, torch.cuda.device_count()), faults)
        if index is not None:
            device, ranks_on_device = torch.cuda.get_device_name(index), 1
            device_id = str(torch.cuda.get_device_properties(index).uuid)
            free_bytes = float(torch.cuda.mem_get_info(index)[0])
    memory = disk = None
    data: dict[str, str] = {}
    if opened is not None:
        sources, complete = opened[0], opened[1]
        keys = [*sources.source_keys, *(f"data.val_sources.{name}" for name in sources.val_sources)]
        for key, source in zip(keys, [*sources.sources, *sources.val_sources.values()], strict=True):
            found = _attempt(lambda key=key, source=source: describe_source(key, source), faults)  # type: ignore[misc]
            if found is not None:
                data[key] = found
        memory, checkpoint = _needs(complete, topology.world_size, ranks_on_device, free_bytes, device != "CPU")
        disk = _disk_need(complete, checkpoint) if topology.is_main else None
    facts = RankFacts(
        rank=topology.rank,
        node=topology.node,
        host=socket.gethostname(),
        sources=hash_sources(PROJECT_ROOT),
        versions=find_versions(device != "CPU"),
        device=device,
        device_id=device_id,
        config=None if config is None else config.model_dump(mode="json"),
        data=data,
        memory=memory,
        disk=disk,
        loopback=_own_loopback() if device == "CPU" else None,
        faults=tuple(faults),
    )
    return facts, config


def hash_sources(project: Path) -> dict[str, str]:
    """Path -> hash of every source file, whether under version control or not."""
    paths = [project / "train.py"]
    for folder in _SOURCE_FOLDERS:
        paths += (project / folder).rglob("*.py")
    return {
        str(path.relative_to(project)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(paths)
        if path.is_file()
    }


def find_versions(has_gpu: bool) -> dict[str, str]:
    """Version of everything whose version matters to the other ranks."""
    versions = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    versions["CUDA"] = torch.version.cuda if has_gpu and torch.version.cuda else "none"
    if has_gpu:
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def describe_source(key: str, source: TokenSource) -> str:
    """Hash of what a source holds, see `fingerprint`; with a manifest the files must have the sizes in it.

    Raises:
        RunError: one has another size.
    """
    for file in source.manifest.files if source.manifest is not None else ():
        size = (source.path / file.name).stat().st_size
        if size != file.size_bytes:
            raise RunError(
                f"{key}: {source.path / file.name} has {size:,} bytes, and {file.size_bytes:,} by its manifest; "
                "copy the data again"
            )
    return fingerprint(source)


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _needs(
    config: Config, world_size: int, ranks_on_device: int, free_bytes: float, on_gpu: bool
) -> tuple[Need, float]:
    """The device's memory, and the bytes of a checkpoint."""
    sizes = model_sizes(config)
    plan = plan_memory(sizes, config, config.deepspeed.zero_stage, world_size, on_gpu)
    return Need(plan.peak, ranks_on_device, 0, free_bytes), checkpoint_bytes(sizes)


def _disk_need(config: Config, checkpoint_bytes: float) -> Need:
    """One more checkpoint than stay: the oldest is removed when the newest is complete."""
    folder = RunFolder.of(config).checkpoints
    used = sum(path.stat().st_size for path in folder.glob("step_*/*") if path.is_file())
    free = shutil.disk_usage(existing_parent(folder)).free
    return Need(checkpoint_bytes, config.checkpoint.keep_last + 1, used, free)


def _own_loopback() -> str | None:
    """gloo listens on the address of the host's name, unless it is told an interface."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return address if address.startswith("127.") else None


def _attempt(function: Callable[[], Any], faults: list[str]) -> Any:
    """The function's result; None and one more fault for each problem where it fails."""
    try:
        return function()
    except ConfigError as error:
        faults += error.problems
    except (RunError, DataError, OSError) as error:
        faults.append(str(error))
    return None
