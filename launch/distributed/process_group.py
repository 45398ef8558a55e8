"""Joins the process group, and leaves it together with the other ranks."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from datetime import timedelta
from typing import NoReturn

import numpy as np
import torch
from torch import distributed as dist

from configs.schema import Config
from launch.distributed.topology import Topology, threads_per_rank
from launch.errors import RunError


def start_distributed(topology: Topology, config: Config) -> torch.device:
    """Joins the process group, seeds every generator and returns this rank's device."""
    threads = threads_per_rank(os.environ, topology.local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)
    if torch.cuda.is_available():
        device = torch.device("cuda", local_device(topology, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    _join_process_group(topology, device, timedelta(seconds=config.deepspeed.timeout_seconds))
    _seed_everything(config.run.seed, config.run.deterministic)
    return device


def local_device(topology: Topology, num_visible: int) -> int:
    """Returns the index of this rank's GPU; 0 if the launcher shows each rank only its own.

    Raises:
        RunError: There are several GPUs but fewer than ranks.
    """
    if num_visible == 1:
        return 0
    if topology.local_world_size > num_visible:
        raise RunError(
            f"{topology.local_world_size} ranks were started here, but this node has {num_visible} GPUs; start one "
            "rank for each"
        )
    return topology.local_rank


def _join_process_group(topology: Topology, device: torch.device, timeout: timedelta) -> None:
    # DeepSpeed calls collectives by deprecated names, and torch would print a warning at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # DeepSpeed reads these itself; only its launcher and torchrun set all of them.
    os.environ.update(
        RANK=str(topology.rank),
        LOCAL_RANK=str(device.index or 0) if device.type == "cuda" else str(topology.local_rank),
        WORLD_SIZE=str(topology.world_size),
        MASTER_ADDR=topology.master_addr,
        MASTER_PORT=str(topology.master_port),
    )
    # DeepSpeed clones groups with torch's default timeout, whichever it is given; so the default itself is set.
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method="env://",
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timeout,
        # Bound to a device, a single rank would split a communicator for every group that DeepSpeed creates.
        device_id=device if device.type == "cuda" and topology.world_size > 1 else None,
    )


def _seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("highest" if deterministic else "high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def leave(exit_code: int) -> NoReturn:
    """Waits for the other ranks and exits without the interpreter's shutdown.

    That shutdown tears down gloo's threads and DeepSpeed's groups in an order that sometimes aborts a process whose run
    is finished, which a launcher would report as a failure.
    """
    dist.barrier()
    if dist.get_backend() == "nccl":
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
