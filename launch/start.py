"""What happens once before the steps: the run's folder, and what is said about the run."""

from __future__ import annotations

import logging

import torch
from data.loader import BatchGeometry

from configs.schema import Config
from launch.collective import on_main_rank
from launch.logs import start_file_log
from launch.run_folder import RunFolder, finished_step, open_run_folder
from launch.topology import Topology
from launch.training_data import TrainingData, describe_data

log = logging.getLogger(__name__)


def prepare_folder(folder: RunFolder, config: Config, topology: Topology) -> None:
    """Makes or checks the run's folder and starts the log files. Collective.

    Raises:
        SharedError: the folder cannot be used; see `open_run_folder`.
    """
    changes = on_main_rank(lambda: open_run_folder(folder, config))
    start_file_log(folder.log(topology.rank))
    for change in changes:
        log.info("configuration changed since the last start: %s", change)


def is_finished(folder: RunFolder, config: Config) -> bool:
    """Whether the run has already reached its last step; a marker of a shorter run is removed. Collective."""
    last_step = config.train.stop_step or config.train.steps

    def look() -> bool:
        finished = finished_step(folder)
        if finished is not None and finished >= last_step:
            return True
        folder.done.unlink(missing_ok=True)
        return False

    finished = on_main_rank(look)
    if finished:
        log.info("%s is finished (step %d); nothing to do", folder.path, last_step)
    return finished


def announce(
    config: Config, data: TrainingData, geometry: BatchGeometry, topology: Topology, device: torch.device
) -> None:
    """Says what is about to run."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    log.info(
        "run %s: %d rank%s on %s, ZeRO stage %d, %s",
        RunFolder.of(config).path,
        topology.world_size,
        "s" if topology.world_size > 1 else "",
        accelerator,
        config.deepspeed.zero_stage,
        config.train.precision,
    )
    for line in [*describe_data(data, config), describe_batch(config, geometry)]:
        log.info("%s", line)


def describe_batch(config: Config, geometry: BatchGeometry) -> str:
    """The batch arithmetic in one line."""
    slots = geometry.world_size * geometry.micro_batch_size * geometry.accumulation
    empty = slots - geometry.samples_per_step
    return (
        f"batch: {config.train.global_batch_tokens:,} tokens = {geometry.samples_per_step} sequences of "
        f"{config.data.seq_len} = {geometry.world_size} ranks x {geometry.micro_batch_size} sequences x "
        f"{geometry.accumulation} accumulation steps" + (f", {empty} of them empty" if empty else "")
    )
