"""Loads the starting point into the engine, prepares the run's folder, and logs a summary of the run."""

from __future__ import annotations

import logging

import torch

from configs.schema import Config
from data.loader import BatchGeometry
from launch.checkpoint.files import read_config
from launch.checkpoint.restore import restore
from launch.checkpoint.retention import clean_leftovers, supersede_newer_checkpoints
from launch.distributed.collective import on_main_rank
from launch.distributed.topology import Topology
from launch.engine.engine import Engine
from launch.run_folder.folder import RunFolder
from launch.training.data import TrainingData, describe_data
from launch.training.resume import Start, record_start

log = logging.getLogger(__name__)


def load_start(engine: Engine, start: Start, folder: RunFolder, config: Config) -> None:
    """Loads the weights (when resuming, the whole state), and prepares the run's folder. Collective."""
    if start.checkpoint is not None:
        restore(engine, start.checkpoint, weights_only=start.state is None)
    changes = on_main_rank(lambda: _prepare_folder(folder, config, start))
    for change in changes:
        log.info("configuration changed since %s: %s", "the checkpoint" if start.state else "the last start", change)
    if start.state is not None:
        log.info("resuming from %s at step %d", start.checkpoint, start.step)
    elif start.checkpoint is not None:
        log.info("starting from the weights of %s", start.checkpoint)


def log_run_summary(
    config: Config, data: TrainingData, geometry: BatchGeometry, topology: Topology, device: torch.device
) -> None:
    """Logs the run, its data and its batch."""
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
    """Describes in one line how the global batch is divided."""
    slots = geometry.world_size * geometry.micro_batch_size * geometry.accumulation
    empty = slots - geometry.samples_per_step
    return (
        f"batch: {config.train.global_batch_tokens:,} tokens = {geometry.samples_per_step} sequences of "
        f"{config.data.seq_len} = {geometry.world_size} ranks x {geometry.micro_batch_size} sequences x "
        f"{geometry.accumulation} accumulation steps" + (f", {empty} of them empty" if empty else "")
    )


def _prepare_folder(folder: RunFolder, config: Config, start: Start) -> list[str]:
    """Prepares the folder for this start; returns what has changed in the configuration."""
    clean_leftovers(folder.checkpoints)
    supersede_newer_checkpoints(folder.checkpoints, start.step)
    before = None
    if start.state is not None and start.checkpoint is not None:
        before = read_config(start.checkpoint)
    return record_start(folder, config, before)
