"""What the commands of this package share: one-line errors, and progress for terminals and for log files."""

import argparse
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from data.errors import DataError

_SECONDS_BETWEEN_LINES = 10.0


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, like those about data."""

    def error(self, message: str) -> NoReturn:
        raise DataError(f"{message} (see --help)")


def run_command(command: Callable[[], int]) -> int:
    """Run a command; a user's fault becomes one line `error: …` and exit code 2."""
    try:
        return command()
    except (DataError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


class Progress:
    """Progress over bytes: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._start = self._last_line = time.monotonic()
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(desc=label, total=total_bytes, unit="B", unit_scale=True, leave=False) if on_terminal else None

    def update(self, done_bytes: int, note: str = "") -> None:
        """Report how far it is, in bytes from the start."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done_bytes - self._done_bytes)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            megabytes, total_megabytes = done_bytes / 1e6, self._total_bytes / 1e6
            rate = megabytes / (self._last_line - self._start)
            print(
                f"{self._label}: {megabytes:,.0f} of {total_megabytes:,.0f} MB, {rate:.1f} MB/s {note}",
                flush=True,
            )
        self._done_bytes = done_bytes

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
