"""What happens once before the steps: where the run starts from, and what is said about it."""

from __future__ import annotations

import logging

import torch

from configs.schema import Config
from data.loader import BatchGeometry
from launch.checkpoint.files import read_config
from launch.checkpoint.restore import restore
from launch.checkpoint.retention import clean_leftovers, set_newer_aside
from launch.distributed.collective import on_main_rank
from launch.distributed.topology import Topology
from launch.engine.engine import Engine
from launch.run_folder.folder import RunFolder
from launch.training.data import TrainingData, describe_data
from launch.training.resume import Start, begin_run

log = logging.getLogger(__name__)


def load_start(engine: Engine, start: Start, folder: RunFolder, config: Config) -> None:
    """Loads the weights (and all else when going on), and makes the folder this run's. Collective."""
    if start.checkpoint is not None:
        restore(engine, start.checkpoint, weights_only=start.state is None)
    changes = on_main_rank(lambda: _take_over(folder, config, start))
    for change in changes:
        log.info("configuration changed since %s: %s", "the checkpoint" if start.state else "the last start", change)
    if start.state is not None:
        log.info("going on from %s at step %d", start.checkpoint, start.step)
    elif start.checkpoint is not None:
        log.info("starting from the weights of %s", start.checkpoint)


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


def _take_over(folder: RunFolder, config: Config, start: Start) -> list[str]:
    """Makes the folder this run's; returns what has changed in its configuration."""
    clean_leftovers(folder.checkpoints)
    set_newer_aside(folder.checkpoints, start.step)
    before = None
    if start.state is not None and start.checkpoint is not None:
        before = read_config(start.checkpoint)
    return begin_run(folder, config, before)
