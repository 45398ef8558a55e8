"""Trains a GPT: `deepspeed train.py CONFIG.yaml key=value …`, or under torchrun, srun or plain Python."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import Config
from data.errors import DataError
from launch.distributed.topology import Topology, detect_topology
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USAGE, INTERRUPTED, RunError, SharedError
from launch.process.rank_status import RankOutcome, find_watched_parents, rank_text, register_rank, report_outcome
from launch.process.stop import StopRequest

if TYPE_CHECKING:
    import torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 finished, 75 stopped on request after a checkpoint, 1 failed, 2 wrong usage."""
    options = parse_arguments(arguments)
    is_main = rank_text(os.environ) == "0"
    try:
        config = load_config(options.config, options.overrides)
        if options.dry_run or options.plan:
            from launch.planning.plan import print_plan, print_proposal

            if options.dry_run:
                print_plan(config, options.gpu_memory)
            else:
                print_proposal(config, options.gpus, options.gpu_memory)
            return EXIT_DONE
        train(config, detect_topology(os.environ, options.local_rank))
    except ConfigError as error:
        return fail(EXIT_USAGE, str(error), when=is_main)
    except SharedError as error:
        return fail(EXIT_FAILURE, str(error), when=is_main)
    except (RunError, DataError, OSError) as error:
        return fail(EXIT_FAILURE, f"rank {rank_text(os.environ)}: {error}")
    except KeyboardInterrupt:
        return fail(EXIT_FAILURE, INTERRUPTED, when=is_main)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides a key, e.g. optim.lr=1e-3")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--dry-run", action="store_true", help="print what would run, without training")
    only.add_argument("--plan", action="store_true", help="propose settings that fit --gpus of --gpu-memory each")
    parser.add_argument("--gpus", metavar="N", help="number of GPUs, for --plan")
    parser.add_argument("--gpu-memory", metavar="80GB", help="memory of one GPU, for --plan and --dry-run")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    options = parser.parse_args(arguments)
    if options.gpus is not None and not options.plan:
        parser.error(f"--gpus {options.gpus} is only for --plan; the launcher sets the number of GPUs of a run")
    if options.gpu_memory is not None and not (options.plan or options.dry_run):
        parser.error(f"--gpu-memory {options.gpu_memory} is only for --plan and --dry-run")
    return options


def train(config: Config, topology: Topology) -> NoReturn:
    """Joins the other ranks, runs, and exits together with them. Never returns normally."""
    stop = StopRequest(config.train.max_seconds, find_watched_parents(os.environ))
    stop.listen()
    register_rank(os.environ)
    from launch.distributed.failures import explain
    from launch.distributed.process_group import leave, start_distributed
    from launch.process.logs import record_failure, start_screen_log

    start_screen_log(topology.is_main)
    try:
        device = start_distributed(topology, config)
        exit_code = run(config, topology, device, stop)
    except Exception as error:
        explained = explain(error)
        record_failure(explained)
        report_outcome(RankOutcome(EXIT_FAILURE, str(explained)))
        if explained is error:
            raise
        raise explained from None
    if stop.is_orphan and exit_code != EXIT_DONE:
        exit_code = EXIT_FAILURE
    report_outcome(RankOutcome(exit_code, is_orphan=stop.is_orphan))
    leave(exit_code)


def run(config: Config, topology: Topology, device: torch.device, stop: StopRequest | None = None) -> int:
    """Runs training in the current process group, and returns the exit code."""
    from launch.distributed.collective import on_all_ranks, on_main_rank
    from launch.engine.build import build_model
    from launch.engine.engine import Engine
    from launch.process.logs import start_file_log
    from launch.process.watchdog import Watchdog, stacks_file
    from launch.run_folder.folder import RunFolder
    from launch.run_folder.lock import FolderLock
    from launch.training.data import batch_geometry, open_data, probe_batch
    from launch.training.resume import check_folder, choose_start, is_finished
    from launch.training.rollback import Rollback, choose_rollback_start
    from launch.training.start import load_start, log_run_summary
    from launch.training.trainer import Trainer

    data, config = on_all_ranks(lambda: open_data(config))
    folder = RunFolder.of(config)
    stop = stop or StopRequest(config.train.max_seconds)
    watchdog = Watchdog(config.watchdog, stacks_file(folder.path, topology.rank), topology.rank)
    with closing(FolderLock(folder)) as lock, watchdog:
        on_main_rank(lock.acquire)
        on_main_rank(lambda: check_folder(folder, config))
        start_file_log(folder.log(topology.rank))
        start = first_start = choose_start(config, folder, data, topology)
        if is_finished(folder, config):
            return EXIT_DONE
        geometry = batch_geometry(config, topology.world_size)
        log_run_summary(config, data.skipping(start.skipped), geometry, topology, device)
        rollbacks: Counter[Path | None] = Counter()
        while True:
            model = build_model(config, topology, device)
            engine = Engine(model, config, topology, device, geometry.accumulation, probe_batch(data, config))
            load_start(engine, start, folder, config)
            kept = data.skipping(start.skipped)
            outcome = Trainer(config, folder, kept, geometry, engine, start.state, stop, watchdog).fit()
            if not isinstance(outcome, Rollback):
                return outcome
            watchdog.expect_slow_start()
            engine.close()
            del model, engine
            start = choose_rollback_start(outcome, first_start, config, folder, topology, rollbacks)


def fail(exit_code: int, message: str, when: bool = True) -> int:
    """Reports an error, prints one line per problem if `when`, and returns the exit code."""
    report_outcome(RankOutcome(exit_code, message))
    if when:
        lines = message.splitlines()
        text = message if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems", *lines])
        print(f"error: {text}", file=sys.stderr, flush=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
