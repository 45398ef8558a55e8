"""Trains a GPT: `deepspeed train.py CONFIG.yaml key=value …`, or under torchrun, srun or plain Python."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import Config
from data.errors import DataError
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USAGE, RunError, SharedError
from launch.topology import Topology, detect_topology

if TYPE_CHECKING:
    import torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 finished, 75 stopped on request after a checkpoint, 1 failed, 2 wrong usage."""
    options = parse_arguments(arguments)
    is_main = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    try:
        config = load_config(options.config, options.overrides)
        if options.dry_run:
            from launch.plan import print_plan

            print_plan(config)
            return EXIT_DONE
        train(config, detect_topology(os.environ, options.local_rank))
    except ConfigError as error:
        report(str(error), when=is_main)
        return EXIT_USAGE
    except SharedError as error:
        report(str(error), when=is_main)
        return EXIT_FAILURE
    except (RunError, DataError, OSError) as error:
        report(f"rank {os.environ.get('RANK', '0')}: {error}")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        report("interrupted; the run can go on from its last checkpoint", when=is_main)
        return EXIT_FAILURE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a key, e.g. optim.lr=1e-3")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, without data or training")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_args(arguments)


def train(config: Config, topology: Topology) -> NoReturn:
    """Joins the other ranks, runs, and ends the process together with them; returns only by an exception."""
    from launch.engine import leave, start_distributed
    from launch.failures import explain
    from launch.logs import record_failure, start_screen_log

    start_screen_log(topology.is_main)
    device = start_distributed(topology, config)
    try:
        exit_code = run(config, topology, device)
    except Exception as error:
        explained = explain(error)
        record_failure(explained)
        if explained is error:
            raise
        raise explained from None
    leave(exit_code)


def run(config: Config, topology: Topology, device: torch.device) -> int:
    """One run, from its data to its exit code."""
    from launch.collective import on_all_ranks, on_main_rank
    from launch.engine import Engine, build_model
    from launch.logs import start_file_log
    from launch.run_folder import FolderLock, RunFolder, check_folder, released_at_end
    from launch.start import announce, choose_start, is_finished, load_start
    from launch.trainer import Trainer
    from launch.training_data import batch_geometry, open_data

    data, config = on_all_ranks(lambda: open_data(config))
    folder = RunFolder.of(config)
    lock = FolderLock(folder)
    with released_at_end(lock):
        on_main_rank(lock.acquire)
        on_main_rank(lambda: check_folder(folder, config))
        start_file_log(folder.log(topology.rank))
        start = choose_start(config, folder, data, topology)
        if is_finished(folder, config):
            return EXIT_DONE
        geometry = batch_geometry(config, topology.world_size)
        announce(config, data, geometry, topology, device)
        model = build_model(config, topology, device)
        engine = Engine(model, config, topology, device, geometry.accumulation)
        load_start(engine, start, folder, config)
        return Trainer(config, folder, data, geometry, engine, start.state).fit()


def report(message: str, when: bool = True) -> None:
    """Prints an error, one line for each problem."""
    lines = message.splitlines()
    if when:
        text = message if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems", *lines])
        print(f"error: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
