"""Analyses the attention of a trained model: `python -m launch.diagnose MODEL --text FILE --output DIR`.

MODEL is a run's folder, a checkpoint, or the folder of a Hugging Face decoder. Each window of the text passes through
the model once; in a window, the query at position L - 1 represents the length L. The analyses are those of Mudarisov et
al., arXiv 2508.17821. They are written to DIR: tables (CSV), plots (PNG), and report.md and report.html, which explain
them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cli import run_command
from launch.diagnosis import LENGTHS, SET_SIZES


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    options = parse_arguments(arguments)

    def run() -> None:
        from launch.diagnosis.analysis import diagnose  # imports torch

        diagnose(options)

    return run_command(run)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="run, checkpoint, or Hugging Face folder")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder for the results")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer; default: the model's own")
    parser.add_argument("--layers", help="layers to analyse, e.g. 0,3,8-11; default: all")
    parser.add_argument("--heads", help="query heads to analyse; default: all")
    parser.add_argument("--lengths", help=f"lengths L in visible tokens; default: {','.join(map(str, LENGTHS))}")
    parser.add_argument("--set-sizes", help=f"set sizes N; default: {','.join(map(str, SET_SIZES))}")
    parser.add_argument(
        "--max-queries", type=int, default=4, help="windows, each with one query per length (default: 4)"
    )
    parser.add_argument("--random-sets", type=int, default=16, help="random sets per query (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random sets and directions (default: 0)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
