"""What the commands that write a folder share: a folder that appears whole or not at all, and one-line errors."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from configs.errors import ConfigError
from launch.errors import EXIT_DONE, EXIT_FAILURE, RunError

_PARTIAL_SUFFIX = ".partial"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def run_command(command: Callable[[], None]) -> int:
    """Runs a command. A user's fault becomes one line (a line for each problem, where there are several) on stderr.

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


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; it becomes `out` at the end, and disappears when the block fails.

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
        raise RunError(f"{partial}: another process is writing it, or was killed; delete it if so") from None
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


def parse_bytes(text: str) -> int:
    """`5GB` -> 5,000,000,000; also KB, MB, TB, KiB, MiB, GiB, and plain numbers.

    Raises:
        ValueError: it is none of these, or below one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ValueError(f"{text!r} is not a size; expected e.g. 5GB or 500MB")
    return int(float(match[1]) * unit)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
