"""What the commands of this package share: one-line errors, and progress for terminals and for log files."""

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
    """An argument parser whose complaints are one line, like those about data."""

    def error(self, message: str) -> NoReturn:
        raise DataError(f"{message} (see --help)")


def run_command(command: Callable[[], int]) -> int:
    """Run a command; a user's fault becomes one line `error: …` and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # texts and paths have characters that terminals lack
    try:
        return command()
    except BrokenPipeError:  # whoever read the output has had enough, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (DataError, OSError) as error:
        return report_error(error)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def report_error(error: Exception) -> int:
    """Print a user's fault as a line `error: …`; returns the exit code for it."""
    print(f"error: {' '.join(describe_error(error).split())}", file=sys.stderr)
    return 2


def describe_error(error: Exception) -> str:
    """Its message; that of the operating system begins with the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


class Progress:
    """Progress over bytes: a bar on a terminal, otherwise a line every ten seconds.

    Args:
        label: what is being done.
        total_bytes: how much there is; 0 if that is unknown.
        start_bytes: where it begins.
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
        """Report how far it is.

        Args:
            done_bytes: of `total_bytes`.
            note: what else there is to say.
            worked_bytes: what the speed is measured in; by default `done_bytes` since the start.
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
