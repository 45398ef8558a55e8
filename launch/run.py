"""Supervises a run: starts the launcher on every node, forwards signals to every rank, restarts after failures.

Exit codes: 0 the run is finished, 75 stopped on request after a checkpoint, 1 failed, 2 wrong usage. They are derived
from the ranks' reports and the run's DONE marker, not from the launcher's exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from configs.errors import ConfigError
from configs.load import load_config
from launch.cli import add_run_arguments, non_negative_integer, positive_integer, print_problems
from launch.errors import EXIT_FAILURE, EXIT_USAGE, RunError
from launch.supervisor.attempt import LAUNCHERS, Launch
from launch.supervisor.node_options import add_node_arguments, choose_nodes
from launch.supervisor.requests import Requests, log_event, write_line
from launch.supervisor.roles import check_and_supervise, choose_num_ranks, coordinate, serve_as_worker
from launch.supervisor.supervise import ThisNode


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and supervises the run. Returns the exit code."""
    options = parse_arguments(arguments)
    try:
        config = load_config(options.config, options.overrides)
        choice = choose_nodes(options, os.environ)
        num_ranks = choice.hosts[0].slots if choice.hosts else choose_num_ranks(options.launcher, options.num_ranks)
    except ConfigError as error:
        print_problems(error)
        return EXIT_USAGE
    launch = Launch(options.launcher, num_ranks, (options.config, *options.overrides))
    requests = Requests(log_event)
    requests.listen()
    try:
        if choice.node > 0:
            return serve_as_worker(choice, launch, options, requests)
        if choice.needs_coordinator:
            return coordinate(choice, launch, config, options, requests)
        return check_and_supervise(ThisNode(), 1, launch, config, options, requests)
    except (RunError, OSError) as error:
        write_line(2, f"error: {error}")
        return EXIT_FAILURE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.run", description=(__doc__ or "").split("\n\n")[0])
    add_run_arguments(parser)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="deepspeed", help="default: deepspeed")
    parser.add_argument(
        "--num-ranks", type=positive_integer, metavar="N", help="ranks per node; default: one per GPU, or one on CPU"
    )
    add_node_arguments(parser)
    parser.add_argument(
        "--max-restarts",
        type=non_negative_integer,
        default=0,
        metavar="R",
        help="restart from the last checkpoint after a failure, at most R times; default: 0",
    )
    check = parser.add_mutually_exclusive_group()
    check.add_argument("--check", action="store_true", help="only run the preflight, see launch.preflight")
    check.add_argument("--no-check", action="store_true", help="skip the preflight on several nodes")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
