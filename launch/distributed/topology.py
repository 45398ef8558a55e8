"""Reads rank, world size and node of this process from the variables of its launcher."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from launch.errors import RunError


@dataclass(frozen=True)
class Topology:
    """The place of this process among all processes of the run.

    Attributes:
        launcher: `torch` (deepspeed and torchrun set the same variables), `slurm` or `plain` (one process).
        rank, world_size: This process's rank and the number of ranks, over all nodes.
        local_rank, local_world_size: The same on this node.
        node: This node's number.
        master_addr, master_port: Where rank 0 listens.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    master_addr: str
    master_port: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def detect_topology(environ: Mapping[str, str], local_rank_argument: int | None = None) -> Topology:
    """Reads the launcher's variables.

    Args:
        environ: Usually `os.environ`.
        local_rank_argument: The value of `--local_rank`, which the deepspeed launcher passes as well.

    Raises:
        RunError: The variables are incomplete or contradict each other; the message names them.
    """
    # Set by srun, but not by sbatch or salloc.
    has_srun = _integer(environ, "SLURM_STEP_NUM_TASKS", default=1) > 1
    if "RANK" in environ or "WORLD_SIZE" in environ:
        topology = _from_torch_variables(environ, local_rank_argument)
        if has_srun and not any(name in environ for name in ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")):
            _check_both(topology, environ)
        return topology
    if has_srun:
        return _from_srun(environ)
    return Topology("plain", 0, 1, 0, 1, 0, "127.0.0.1", free_port())


def _from_torch_variables(environ: Mapping[str, str], local_rank_argument: int | None) -> Topology:
    rank, world_size = _below(environ, "RANK", "WORLD_SIZE")
    local_rank = _integer(environ, "LOCAL_RANK", default=local_rank_argument)
    if "LOCAL_RANK" in environ and local_rank_argument not in (None, -1, local_rank):
        raise RunError(f"--local_rank={local_rank_argument} contradicts LOCAL_RANK={local_rank}")
    # deepspeed sets the first, torchrun the second.
    local_size_name = "LOCAL_SIZE" if "LOCAL_WORLD_SIZE" not in environ else "LOCAL_WORLD_SIZE"
    local_world_size = _integer(environ, local_size_name, default=local_rank + 1)
    if not 0 <= local_rank < local_world_size:
        raise RunError(
            f"LOCAL_RANK={local_rank} is not in 0..{local_size_name}-1 with {local_size_name}={local_world_size}"
        )
    if local_world_size > world_size:
        raise RunError(f"{local_size_name}={local_world_size} contradicts WORLD_SIZE={world_size}")
    if local_rank > rank:
        raise RunError(f"LOCAL_RANK={local_rank} contradicts RANK={rank}")
    node = (rank - local_rank) // local_world_size
    for name, size_name in (("CROSS_RANK", "CROSS_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE")):
        if name in environ:
            node, _ = _below(environ, name, size_name)
    return Topology("torch", rank, world_size, local_rank, local_world_size, node, *_master(environ))


def _from_srun(environ: Mapping[str, str]) -> Topology:
    rank, world_size = _below(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    local_rank, node = _integer(environ, "SLURM_LOCALID"), _integer(environ, "SLURM_NODEID")
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environ.get(name, "")
    tasks_per_node = _expand_counts(text)
    if sum(tasks_per_node) != world_size:
        raise RunError(f"{name}={text} contradicts SLURM_STEP_NUM_TASKS={world_size}")
    if not 0 <= node < len(tasks_per_node):
        raise RunError(f"SLURM_NODEID={node} contradicts {name}={text}")
    if not 0 <= local_rank < tasks_per_node[node]:
        raise RunError(f"SLURM_LOCALID={local_rank} contradicts {name}={text} on node {node}")
    return Topology("slurm", rank, world_size, local_rank, tasks_per_node[node], node, *_master(environ))


def _check_both(topology: Topology, environ: Mapping[str, str]) -> None:
    """Checks torch's variables, set by hand under srun without a launcher, against srun's: each task needs its own."""
    for name, value, slurm_name in (
        ("RANK", topology.rank, "SLURM_PROCID"),
        ("WORLD_SIZE", topology.world_size, "SLURM_STEP_NUM_TASKS"),
        ("LOCAL_RANK", topology.local_rank, "SLURM_LOCALID"),
    ):
        if value != _integer(environ, slurm_name):
            raise RunError(
                f"{name}={value} contradicts {slurm_name}={environ[slurm_name]}; unset RANK and WORLD_SIZE, "
                "since srun's variables suffice"
            )


def _expand_counts(text: str) -> list[int]:
    """Expands SLURM's counts: `2(x3),1` -> [2, 2, 2, 1]; any other format -> []."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    port = _integer(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise RunError(f"MASTER_PORT={port} is not a port; expected 1 to 65535")
    return _text(environ, "MASTER_ADDR"), port


def free_port(address: str = "127.0.0.1") -> int:
    """Returns a TCP port that is free right now at an address of this host; "" means all addresses."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])


def threads_per_rank(environ: Mapping[str, str], local_world_size: int) -> int | None:
    """Returns the CPU threads of this rank: an even share of the cores, or None if OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise RunError(_missing(environ, name))
    return environ[name]


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name in environ:
        try:
            return int(environ[name])
        except ValueError:
            raise RunError(f"{name}={environ[name]!r} is not a whole number") from None
    if default is None or default < 0:
        raise RunError(_missing(environ, name))
    return default


def _below(environ: Mapping[str, str], name: str, size_name: str) -> tuple[int, int]:
    """Reads a number and the size that it must be below."""
    value, size = _integer(environ, name), _integer(environ, size_name)
    if not 0 <= value < size:
        raise RunError(f"{name}={value} is not in 0..{size_name}-1 with {size_name}={size}")
    return value, size


def _missing(environ: Mapping[str, str], name: str) -> str:
    if name.startswith("MASTER_") and "SLURM_PROCID" in environ:
        return (
            f"{name} is not set; srun does not set it: export MASTER_ADDR (the first node) and MASTER_PORT, or use "
            "launch.submit"
        )
    return f"{name} is not set; the launcher's variables are incomplete"
