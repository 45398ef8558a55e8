"""Creates a checkpoint from a Hugging Face folder or a GGUF file: `python -m launch.import_hf PATH OUT`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cli import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_arguments(arguments)

    def run() -> None:
        from launch.hf.import_model import import_model  # imports torch

        import_model(options.path, options.out)

    return run_command(run)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.import_hf", description=__doc__)
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a folder with config.json and safetensors (Llama, Qwen3, SmolLM2, dense DeepSeek-V3), or a .gguf file",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder for the checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
