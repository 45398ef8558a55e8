"""Which process this is: the environments of the launchers, mapped to ranks, world size and node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from launch.errors import RunError


@dataclass(frozen=True)
class Topology:
    """The place of this process among all processes of the run.

    Attributes:
        launcher: `torch` (deepspeed and torchrun set the same variables), `slurm` or `plain` (one process).
        rank, world_size: over all nodes.
        local_rank, local_world_size: on this node.
        master_addr, master_port: where rank 0 listens.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def detect_topology(environ: Mapping[str, str], local_rank_argument: int | None = None) -> Topology:
    """Reads the launcher's variables.

    Args:
        environ: usually `os.environ`.
        local_rank_argument: `--local_rank`, which the deepspeed launcher passes as well.

    Raises:
        RunError: when the variables are incomplete or contradict each other; it names them.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        launcher = "torch"
        topology = Topology(
            launcher=launcher,
            rank=_integer(environ, "RANK"),
            world_size=_integer(environ, "WORLD_SIZE"),
            local_rank=_integer(environ, "LOCAL_RANK", default=local_rank_argument),
            local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=1),
            master_addr=_text(environ, "MASTER_ADDR"),
            master_port=_integer(environ, "MASTER_PORT"),
        )
        argument_differs = local_rank_argument not in (None, -1, topology.local_rank)
        if argument_differs and "LOCAL_RANK" in environ:
            raise RunError(f"--local_rank={local_rank_argument} contradicts LOCAL_RANK={topology.local_rank}")
    elif _integer(environ, "SLURM_STEP_NUM_TASKS", default=1) > 1:  # only srun sets it, not a batch script or salloc
        topology = Topology(
            launcher="slurm",
            rank=_integer(environ, "SLURM_PROCID"),
            world_size=_integer(environ, "SLURM_STEP_NUM_TASKS"),
            local_rank=_integer(environ, "SLURM_LOCALID"),
            local_world_size=max(
                1, _integer(environ, "SLURM_STEP_NUM_TASKS") // _integer(environ, "SLURM_STEP_NUM_NODES", default=1)
            ),
            master_addr=_text(environ, "MASTER_ADDR"),
            master_port=_integer(environ, "MASTER_PORT"),
        )
    else:
        topology = Topology("plain", 0, 1, 0, 1, "127.0.0.1", free_port())
    if not 0 <= topology.rank < topology.world_size:
        raise RunError(f"RANK={topology.rank} is not in 0..WORLD_SIZE-1 with WORLD_SIZE={topology.world_size}")
    return topology


def free_port() -> int:
    """A TCP port on the loopback interface that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def threads_per_rank(environ: Mapping[str, str], local_world_size: int) -> int | None:
    """CPU threads for this rank: None where OMP_NUM_THREADS decides, else an even share of the cores."""
    if "OMP_NUM_THREADS" in environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise RunError(f"{name} is not set; launchers set it, and under srun export it (with rank 0's host) yourself")
    return environ[name]


def _integer(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if name in environ:
            try:
                return int(environ[name])
            except ValueError:
                raise RunError(f"{name}={environ[name]!r} is not a whole number") from None
    if default is None or default < 0:
        raise RunError(f"{names[0]} is not set; the launcher's variables are incomplete")
    return default
