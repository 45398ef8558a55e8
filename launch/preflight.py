"""Compares all nodes before a run: code, versions, configuration, data, clocks, memory, disk and network.

It is started like train.py, by the same launcher on the same nodes: `deepspeed --module launch.preflight CONFIG.yaml
…`, `torchrun -m launch.preflight …`, `srun python -m launch.preflight …`. Exit codes: 0 no problem; 1 problems, one
line each with the node and the remedy; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from launch.cli import add_run_arguments, positive_integer
from launch.distributed.topology import detect_topology
from launch.errors import EXIT_FAILURE, RunError
from launch.process.rank_status import RankOutcome, report_outcome

TIMEOUT_SECONDS = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all checks together with the other ranks. Returns the exit code."""
    options = parse_arguments(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # otherwise torch logs every connection attempt
    is_first = True
    try:
        topology = detect_topology(os.environ, options.local_rank)
        is_first = topology.local_rank == 0
        from launch.preflight_checks.run import check  # imports torch

        return check(topology, options.config, options.overrides, options.timeout)
    except RunError as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.preflight", description=(__doc__ or "").split("\n\n")[0])
    add_run_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=positive_integer,
        default=TIMEOUT_SECONDS,
        metavar="S",
        help=f"seconds to wait for the other ranks; default: {TIMEOUT_SECONDS}",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_intermixed_args(arguments)


def _exit_now(exit_code: int) -> NoReturn:
    """Exits without the interpreter's shutdown, which would wait for an all-reduce that hangs."""
    report_outcome(RankOutcome(exit_code))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _exit_now(main())
