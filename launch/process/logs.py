"""Logging: rank 0 logs to the screen and log.txt, other ranks log warnings to rank_N.log."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

from tqdm import tqdm

from configs.errors import ConfigError
from data.errors import DataError
from launch.errors import RunError

EXPECTED_FAILURES = (ConfigError, DataError, RunError, OSError)


class _ScreenHandler(logging.Handler):
    """Prints above a progress bar, if there is one. A closed standard output (`| tee` after Ctrl-C) is ignored."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except OSError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - flushing the buffer would fail again


class _FileHandler(logging.FileHandler):
    """Ignores a full disk: the message is on the screen as well."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def _report_thread(failure: threading.ExceptHookArgs) -> None:
    """Logs one line instead of a traceback when a background thread, e.g. TensorBoard's, cannot write."""
    if isinstance(failure.exc_value, OSError):
        logging.getLogger(__name__).warning("a background thread could not write: %s", failure.exc_value)
    else:
        threading.__excepthook__(failure)


def start_screen_log(is_main: bool) -> None:
    """Shows rank 0's messages on the screen; other ranks print nothing."""
    threading.excepthook = _report_thread
    root = logging.getLogger("launch")
    root.setLevel(logging.INFO if is_main else logging.WARNING)
    root.propagate = False
    if is_main:
        handler = _ScreenHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)


def start_file_log(path: Path) -> None:
    """Also appends messages, with their time, to a file, which the first message creates."""
    handler = _FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("launch").addHandler(handler)


def record_failure(error: Exception) -> None:
    """Writes the error that ends the run to this rank's file: one line, and for a bug the traceback as well.

    The entry script prints it on the screen.
    """
    stack = None if isinstance(error, EXPECTED_FAILURES) else (type(error), error, error.__traceback__)
    name = logging.getLogger(__name__).name
    record = logging.LogRecord(name, logging.ERROR, __file__, 0, "the run ended: %s", (error,), stack)
    for handler in logging.getLogger("launch").handlers:
        if isinstance(handler, _FileHandler):
            handler.handle(record)
