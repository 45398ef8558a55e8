"""Trains a GPT: `deepspeed train.py CONFIG.yaml key=value …`, or under torchrun, srun or plain Python."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import Config
from data.errors import DataError
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USAGE, RunError, SharedError
from launch.topology import Topology, detect_topology

if TYPE_CHECKING:
    import torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 finished, 75 stopped on request after a checkpoint, 1 failed, 2 wrong usage."""
    options = parse_arguments(arguments)
    is_main = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    try:
        config = load_config(options.config, options.overrides)
        if options.dry_run:
            from launch.plan import print_plan

            print_plan(config)
            return EXIT_DONE
        return train(config, detect_topology(os.environ, options.local_rank))
    except ConfigError as error:
        report("\n  ".join(["", *error.problems]) if len(error.problems) > 1 else str(error), when=is_main)
        return EXIT_USAGE
    except SharedError as error:
        report(str(error), when=is_main)
        return EXIT_FAILURE
    except (RunError, DataError, OSError) as error:
        report(f"rank {os.environ.get('RANK', '0')}: {error}")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        report("interrupted before a checkpoint; the run can go on from its last one", when=is_main)
        return EXIT_FAILURE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a key, e.g. optim.lr=1e-3")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, without data or training")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_args(arguments)


def train(config: Config, topology: Topology) -> int:
    """Joins the other ranks, runs, and leaves. Returns the exit code."""
    from launch.engine import start_distributed, stop_distributed
    from launch.logs import start_screen_log

    start_screen_log(topology.is_main)
    device = start_distributed(topology, config)
    exit_code = run(config, topology, device)
    stop_distributed()
    return exit_code


def run(config: Config, topology: Topology, device: torch.device) -> int:
    """One run, from its data to its exit code."""
    from launch.engine import Engine, build_model
    from launch.run_folder import RunFolder
    from launch.start import announce, is_finished, prepare_folder
    from launch.trainer import Trainer
    from launch.training_data import batch_geometry, open_data

    data, config = open_data(config)
    folder = RunFolder.of(config)
    prepare_folder(folder, config, topology)
    if is_finished(folder, config):
        return EXIT_DONE
    geometry = batch_geometry(config, topology.world_size)
    announce(config, data, geometry, topology, device)
    model = build_model(config, topology, device)
    engine = Engine(model, config, topology, device, geometry.accumulation)
    trainer = Trainer(config, folder, data, geometry, engine)
    trainer.restore()
    return trainer.fit()


def report(message: str, when: bool = True) -> None:
    if when:
        print(f"error: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
