"""Attention of a trained model, analysed: `python -m launch.diagnose MODEL --text FILE --output DIR`.

MODEL is a run's folder, a checkpoint, or a Hugging Face decoder's folder. Windows of the text run through the model
once; in each window, the query at position L - 1 stands for the length L. The analyses are those of Mudarisov et al.,
arXiv 2508.17821. DIR gets tables (CSV), figures (PNG) and report.md / report.html, which explain them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cli import run_command
from launch.diagnosis import LENGTHS, SET_SIZES


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_arguments(arguments)
    from launch.diagnosis.analysis import diagnose  # imports torch

    return run_command(lambda: diagnose(options))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="run, checkpoint, or Hugging Face folder")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text in UTF-8")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder for the results")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer; default: the model's own")
    parser.add_argument("--layers", help="e.g. 0,3,8-11; default: all")
    parser.add_argument("--heads", help="default: all")
    parser.add_argument("--lengths", help=f"visible tokens; default: {','.join(map(str, LENGTHS))}")
    parser.add_argument("--set-sizes", help=f"N; default: {','.join(map(str, SET_SIZES))}")
    parser.add_argument("--max-queries", type=int, default=4, help="queries of each length: one a window (default: 4)")
    parser.add_argument("--random-sets", type=int, default=16, help="random sets of each query (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the random sets and directions (default: 0)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
