"""Shared by the commands: arguments, number parsers, and one-line errors. Does not import torch, so --help is fast."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from pydantic import ByteSize, TypeAdapter

from configs.errors import ConfigError
from launch.errors import EXIT_DONE, EXIT_FAILURE, RunError

_SIZE = re.compile(r"\d+(\.\d+)? ?([KMGT]i?)?B?", re.IGNORECASE | re.ASCII)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a run: its configuration and overridden keys."""
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration of the run, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a key, e.g. optim.lr=1e-3")


def positive_integer(text: str) -> int:
    """An argparse type: 1, 2, …"""
    return _integer(text, smallest=1)


def non_negative_integer(text: str) -> int:
    """An argparse type: 0, 1, …"""
    return _integer(text, smallest=0)


def byte_size(text: str) -> int:
    """Parses a number of bytes, such as 5GB, 500 MB, 80GiB or 4096.

    Raises:
        ValueError: The text is not a size, or less than one byte.
    """
    num_bytes = 0
    if _SIZE.fullmatch(text.strip()):  # ByteSize itself ignores what follows a size: "5,000MB" would be 5 bytes
        num_bytes = int(TypeAdapter(ByteSize).validate_python(text.strip()))
    if num_bytes < 1:
        raise ValueError(f"{text!r} is not a size; expected e.g. 5GB or 500MB")
    return num_bytes


def byte_size_argument(text: str) -> int:
    """An argparse type: see `byte_size`."""
    try:
        return byte_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_command(command: Callable[[], None]) -> int:
    """Runs a command. A user's mistake is printed as one line on stderr, or one line for each problem.

    Returns:
        The exit code.
    """
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        command()
    except (RunError, ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_FAILURE
    finally:
        signal.signal(signal.SIGTERM, previous)
    return EXIT_DONE


def print_problems(error: ConfigError) -> None:
    """Prints one line on stderr for each problem of a configuration or command line."""
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)


def _integer(text: str, smallest: int) -> int:
    if not text.isdecimal() or int(text) < smallest:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; expected an integer of at least {smallest}")
    return int(text)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


_PARTIAL_SUFFIX = ".partial"


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a folder next to `out` to write to; it is renamed to `out` at the end, or removed if the block fails.

    Raises:
        RunError: `out` exists and is not an empty folder, or another process is writing it.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out}: exists and is not an empty folder; choose another one")
    partial = out.with_name(out.name + _PARTIAL_SUFFIX)
    new_parents = [parent for parent in partial.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise RunError(f"{partial}: another process is writing it; delete it if that process was killed") from None
    try:
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
