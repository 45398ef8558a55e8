"""Exports a model for Hugging Face's `transformers`: `python -m launch.export CHECKPOINT OUT`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cli import byte_size_argument, run_command
from launch.hf import DTYPES


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_arguments(arguments)

    def run() -> None:
        from launch.hf.export import export  # imports torch

        export(options.checkpoint, options.out, options.dtype, options.max_shard_size)

    return run_command(run)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="type of the weights (default: bf16)")
    parser.add_argument(
        "--max-shard-size",
        type=byte_size_argument,
        default="5GB",
        metavar="SIZE",
        help="largest size of a weight file (default: 5GB)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
