"""Collects the facts that a preflight compares: one rank's code, versions, configuration, data, disk and memory."""

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
    """The bytes that a run needs, and those that are available.

    Attributes:
        each_bytes: The size of one rank, or of one checkpoint.
        count: The number of ranks that share the device, or of checkpoints.
        used_bytes: What the run uses already.
        free_bytes: What is free.
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
    """What one rank sees, as plain values that can be sent as JSON.

    Attributes:
        rank, node: This rank, and the number of its node.
        host: The node's host name.
        sources: File of the project -> hash.
        versions: Package -> version.
        device: Name of the GPU, or "CPU".
        device_id: Unique identifier of the GPU; empty on CPU.
        config: The resolved configuration as a tree; None if it cannot be read.
        data: Key of a data source -> hash of its content.
        memory: Memory of the device; None if the configuration or the data cannot be read.
        disk: Disk of the run's folder, on rank 0; None on others.
        loopback: The loopback address to which the host name resolves, which others cannot reach; None otherwise.
        faults: Problems of this rank alone.
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
    def from_json(cls, tree: dict[str, Any]) -> RankFacts:
        """Reads the tree of `asdict` after it was sent as JSON."""
        needs = {name: None if tree[name] is None else Need(**tree[name]) for name in ("memory", "disk")}
        return cls(**{**tree, **needs, "faults": tuple(tree["faults"])})


def collect_facts(topology: Topology, path: str, overrides: Sequence[str]) -> tuple[RankFacts, Config | None]:
    """Returns what this rank sees, and its configuration, or None if it is invalid. A user's mistakes become faults."""
    faults: list[str] = []
    config = _try(lambda: load_config(path, overrides), faults)
    opened = _try(lambda: open_data(config), faults) if config is not None else None
    device_id = ""
    device, free_bytes, ranks_on_device = "CPU", float(psutil.virtual_memory().available), topology.local_world_size
    if torch.cuda.is_available():
        index = _try(lambda: local_device(topology, torch.cuda.device_count()), faults)
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
            found = _try(lambda key=key, source=source: describe_source(key, source), faults)  # type: ignore[misc]
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
    """Returns path -> hash of every source file, whether under version control or not."""
    paths = [project / "train.py"]
    for folder in _SOURCE_FOLDERS:
        paths += (project / folder).rglob("*.py")
    return {
        str(path.relative_to(project)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(paths)
        if path.is_file()
    }


def find_versions(has_gpu: bool) -> dict[str, str]:
    """Returns the versions that must be the same on all ranks."""
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
    """Returns the hash of a source's content, see `fingerprint`, and checks file sizes against its manifest, if any.

    Raises:
        RunError: A file has another size.
    """
    for file in source.manifest.files if source.manifest is not None else ():
        size = (source.path / file.name).stat().st_size
        if size != file.size_bytes:
            raise RunError(
                f"{key}: {source.path / file.name} has {size:,} bytes instead of {file.size_bytes:,} as in the "
                "manifest; copy the data again"
            )
    return fingerprint(source)


def existing_parent(path: Path) -> Path:
    """Returns the path itself if it exists, or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _needs(
    config: Config, world_size: int, ranks_on_device: int, free_bytes: float, on_gpu: bool
) -> tuple[Need, float]:
    """Returns what the run needs of the device's memory, and the bytes of a checkpoint."""
    sizes = model_sizes(config)
    plan = plan_memory(sizes, config, config.deepspeed.zero_stage, world_size, on_gpu)
    return Need(plan.peak, ranks_on_device, 0, free_bytes), checkpoint_bytes(sizes)


def _disk_need(config: Config, checkpoint_bytes: float) -> Need:
    """Returns what the run needs of the disk: one checkpoint more than it keeps, since the oldest is removed last."""
    folder = RunFolder.of(config).checkpoints
    used = sum(path.stat().st_size for path in folder.glob("step_*/*") if path.is_file())
    free = shutil.disk_usage(existing_parent(folder)).free
    return Need(checkpoint_bytes, config.checkpoint.keep_last + 1, used, free)


def _own_loopback() -> str | None:
    """Returns the address of the host name, on which gloo listens without GLOO_SOCKET_IFNAME, if it is loopback."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return address if address.startswith("127.") else None


def _try(function: Callable[[], Any], faults: list[str]) -> Any:
    """Returns the function's result; on failure None, and adds one fault for each problem."""
    try:
        return function()
    except ConfigError as error:
        faults += error.problems
    except (RunError, DataError, OSError) as error:
        faults.append(str(error))
    return None
