"""Computes the loss and perplexity of a text: `python -m launch.evaluate CHECKPOINT --text FILE`.

The text is split into windows of at most the model's context. Each token except the first is predicted once, from the
tokens before it in its window.

    tokens     0 1 2 3 4 5 6 7 8 9 …
    window 1   ^ ^ ^ ^ ^                 --window 4 (inputs 0–3, targets 1–4)
    window 2           ^ ^ ^ ^ ^         inputs 4–7, targets 5–8
    with --stride 2: inputs 0–3, 2–5, 4–7, …; all targets of the first window count, then the last two of each
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cli import run_command
from launch.inference import DEFAULT_BATCH_TOKENS


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_arguments(arguments)

    def run() -> None:
        from launch.inference.evaluation import print_evaluation  # imports torch

        print_evaluation(options)

    return run_command(run)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run's folder")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="a text file in UTF-8")
    parser.add_argument("--window", type=int, help="tokens per window (default: the model's context)")
    parser.add_argument("--stride", type=int, help="new tokens per window (default: all of them)")
    parser.add_argument("--max-tokens", type=int, help="evaluate only the first tokens of the text (default: all)")
    parser.add_argument(
        "--batch-size", type=int, help=f"windows per batch (default: as many as {DEFAULT_BATCH_TOKENS} tokens hold)"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer file; default: the one in the checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
