"""Shared parts of this package's commands: one-line errors, and progress for terminals and log files."""

import argparse
import io
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from data.errors import DataError

_SECONDS_BETWEEN_LINES = 10.0
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line, like errors in the data."""

    def error(self, message: str) -> NoReturn:
        raise DataError(f"{message} (see --help)")


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; a user's mistake is printed as one line `error: …`, with exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not support every character
    try:
        return command()
    except BrokenPipeError:  # the reader has closed the pipe, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (DataError, OSError) as error:
        return report_error(error)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def report_error(error: Exception) -> int:
    """Print a user's mistake as one line `error: …` and return its exit code."""
    print(f"error: {' '.join(describe_error(error).split())}", file=sys.stderr)
    return 2


def describe_error(error: Exception) -> str:
    """Return the error's message; that of an OSError begins with the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


class Progress:
    """Shows progress over bytes: a bar on a terminal, otherwise a line every ten seconds.

    Args:
        label: The activity, such as "tokenizing".
        total_bytes: The total amount; 0 if it is unknown.
        start_bytes: The amount that was done before.
    """

    def __init__(self, label: str, total_bytes: int, start_bytes: int = 0) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._start_bytes = self._done_bytes = start_bytes
        self._start = self._last_line = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                desc=label,
                total=total_bytes or None,
                initial=start_bytes,
                unit="B",
                unit_scale=True,
                leave=False,
                bar_format=_BAR_FORMAT if total_bytes else None,
            )

    def update(self, done_bytes: int, note: str = "", worked_bytes: int | None = None) -> None:
        """Show the current progress.

        Args:
            done_bytes: The part of `total_bytes` that is done.
            note: More text to show.
            worked_bytes: The amount that the speed is computed from; by default the bytes done since the start.
        """
        now = time.monotonic()
        worked_bytes = done_bytes - self._start_bytes if worked_bytes is None else worked_bytes
        rate = f"{worked_bytes / 1e6 / max(now - self._start, 1e-3):.1f} MB/s"
        notes = ", ".join(filter(None, (rate, note)))
        if self._bar is not None:
            self._bar.set_postfix_str(notes, refresh=False)
            self._bar.update(done_bytes - self._done_bytes)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"{self._label}: {self._how_far(done_bytes)}{notes}{self._time_left(done_bytes, now)}", flush=True)
        self._done_bytes = done_bytes

    def _how_far(self, done_bytes: int) -> str:
        if not self._total_bytes:
            return ""
        return f"{done_bytes / 1e6:,.0f} of {self._total_bytes / 1e6:,.0f} MB, "

    def _time_left(self, done_bytes: int, now: float) -> str:
        if not self._total_bytes or done_bytes <= self._start_bytes:
            return ""
        seconds = (now - self._start) * (self._total_bytes - done_bytes) / (done_bytes - self._start_bytes)
        return f", {tqdm.format_interval(max(seconds, 0))} left"

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
