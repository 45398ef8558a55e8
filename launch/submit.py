"""Renders a SLURM job for a run, from launch/slurm/job.sh, and submits it.

The job stops the run before the time limit and requeues itself after the checkpoint, until the run is finished. Exit
codes: 0 submitted (or printed), 1 rejected by SLURM, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import ConfigError
from launch.cli import add_run_arguments, print_problems
from launch.errors import EXIT_DONE, EXIT_USAGE
from launch.slurm.job import read_job, render, submit

STOP_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, and prints or submits the job. Returns the exit code."""
    options = parse_arguments(arguments)
    try:
        config, job = read_job(options)
    except ConfigError as error:
        print_problems(error)
        return EXIT_USAGE
    script = render(job, config, (options.config, *options.overrides), Path.cwd())
    if options.print:
        print(script, end="")
        return EXIT_DONE
    return submit(script, config)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line, without checking the values."""
    parser = argparse.ArgumentParser(prog="python -m launch.submit", description=(__doc__ or "").split("\n\n")[0])
    add_run_arguments(parser)
    parser.add_argument("--nodes", required=True, metavar="N", help="number of nodes")
    parser.add_argument("--gpus-per-node", metavar="G", help="GPUs per node, with one rank per GPU")
    parser.add_argument("--ranks-per-node", metavar="R", help="on CPU: ranks per node")
    parser.add_argument("--time", required=True, help="time limit of one start, e.g. 4:00:00 or 1-12 (days-hours)")
    parser.add_argument(
        "--stop-seconds",
        default=str(STOP_SECONDS),
        metavar="S",
        help=f"seconds before the limit at which the run saves a checkpoint and stops; default: {STOP_SECONDS}",
    )
    parser.add_argument("--partition", metavar="P", help="SLURM's --partition")
    parser.add_argument("--account", metavar="A", help="SLURM's --account")
    parser.add_argument("--cpus-per-rank", metavar="C", help="CPUs and threads per rank")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="further option of sbatch, e.g. qos=high"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the ranks"
    )
    parser.add_argument("--container", metavar="IMAGE", help="container image (srun's --container-image, with Pyxis)")
    parser.add_argument(
        "--container-mounts",
        metavar="FROM:TO,…",
        help="mounts of the container; must include this folder, run.dir and the data",
    )
    parser.add_argument(
        "--python", metavar="PATH", help="interpreter on the nodes; default: this one, or `python3` in a container"
    )
    parser.add_argument("--print", action="store_true", help="print the job's script instead of submitting it")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
