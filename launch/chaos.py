"""Kills a run repeatedly, resumes it each time, and compares every loss with that of an uninterrupted run.

Half of the kills are inside a save. Both runs are in RUN-chaos/ next to the run's own folder, which is not touched. The
losses must be bit-identical on the same number of ranks; with --ranks 2,1,3 that number changes at each start, and
they must agree within 1e-5. After every kill no process may be left, and every committed checkpoint must verify; at
the end no unfinished file may be left. Exit codes: 0 passed, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from configs.errors import ConfigError
from configs.load import load_config
from launch.cli import add_run_arguments, positive_integer, print_problems
from launch.errors import EXIT_FAILURE, EXIT_USAGE, RunError
from launch.kill_test.comparison import OUTPUT, launcher_for, make_folder, run
from launch.supervisor.attempt import LAUNCHERS
from launch.supervisor.roles import choose_num_ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the test. Returns the exit code."""
    options = parse_arguments(arguments)
    try:
        config = load_config(options.config, options.overrides)
        ranks = options.ranks or [options.num_ranks]
        for number in ranks:
            choose_num_ranks(launcher_for(options.launcher, number), number)
        if len(set(ranks)) > 1 and config.train.precision != "fp32":
            raise ConfigError(["--ranks: losses of different numbers of ranks agree only with train.precision=fp32"])
        parent = make_folder(config)
    except ConfigError as error:
        print_problems(error)
        return EXIT_USAGE
    try:
        with (parent / OUTPUT).open("ab") as output:
            return run(options, config, parent, ranks, output)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
    return EXIT_FAILURE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.chaos", description=__doc__)
    add_run_arguments(parser)
    parser.add_argument("--kills", type=positive_integer, default=20, metavar="K", help="number of kills; default: 20")
    parser.add_argument(
        "--num-ranks", type=positive_integer, default=2, metavar="N", help="number of ranks; default: 2"
    )
    parser.add_argument(
        "--ranks", type=rank_list, metavar="N,N,…", help="number of ranks of each start in turn, e.g. 2,1,3"
    )
    parser.add_argument("--launcher", choices=LAUNCHERS[:2], default="torchrun", help="default: torchrun")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills' times and targets; default: 0")
    return parser.parse_intermixed_args(arguments)


def rank_list(text: str) -> list[int]:
    """An argparse type: a list such as 2,1,3."""
    return [positive_integer(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
