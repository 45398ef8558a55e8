"""Supervises a run: starts the launcher on every node, forwards signals to every rank, restarts after a failure.

Exit codes: 0 the run is finished, 75 stopped on request after a checkpoint, 1 failed, 2 wrong usage. They come from
what the ranks report and from the run's DONE marker, not from the launcher.
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
from launch.supervisor.requests import Requests, say, write_line
from launch.supervisor.roles import carry_through, choose_num_ranks, follow, lead
from launch.supervisor.supervise import ThisNode


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, supervises, and returns the exit code."""
    options = parse_arguments(arguments)
    try:
        config = load_config(options.config, options.overrides)
        choice = choose_nodes(options, os.environ)
        num_ranks = choice.hosts[0].slots if choice.hosts else choose_num_ranks(options.launcher, options.num_ranks)
    except ConfigError as error:
        print_problems(error)
        return EXIT_USAGE
    launch = Launch(options.launcher, num_ranks, (options.config, *options.overrides))
    requests = Requests(say)
    requests.listen()
    try:
        if choice.node > 0:
            return follow(choice, launch, options, requests)
        if choice.is_several:
            return lead(choice, launch, config, options, requests)
        return carry_through(ThisNode(), 1, launch, config, options, requests)
    except (RunError, OSError) as error:
        write_line(2, f"error: {error}")
        return EXIT_FAILURE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.run", description=(__doc__ or "").split("\n\n")[0])
    add_run_arguments(parser)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="deepspeed", help="default: deepspeed")
    parser.add_argument(
        "--num-ranks", type=positive_integer, metavar="N", help="processes on each node; default: its GPUs, 1 on CPU"
    )
    add_node_arguments(parser)
    parser.add_argument(
        "--max-restarts",
        type=non_negative_integer,
        default=0,
        metavar="R",
        help="start again from the last checkpoint after at most R failures; default: 0",
    )
    check = parser.add_mutually_exclusive_group()
    check.add_argument("--check", action="store_true", help="only compare the nodes, see launch.preflight")
    check.add_argument("--no-check", action="store_true", help="do not compare several nodes before the start")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
