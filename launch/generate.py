"""Continues a text: `python -m launch.generate CHECKPOINT --prompt "…"`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cli import run_command
from launch.inference import DEFAULT_NEW_TOKENS


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_arguments(arguments)

    def run() -> None:
        from launch.inference.continuation import print_continuation  # imports torch

        print_continuation(options)

    return run_command(run)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.generate", description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run's folder")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument(
        "--max-new-tokens", type=int, help=f"default: {DEFAULT_NEW_TOKENS}, or fewer if the model's context is full"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 chooses the most likely token (default: 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus sampling (default: 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer file; default: the one in the checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
