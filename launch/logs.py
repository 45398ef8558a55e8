"""Where messages go: rank 0 to the screen and log.txt, other ranks' warnings to rank_N.log."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

from tqdm import tqdm


class _ScreenHandler(logging.Handler):
    """Prints above a progress bar, if one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


class _FileHandler(logging.FileHandler):
    """Says nothing when the disk is full: the same message is on the screen."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def _report_thread(failure: threading.ExceptHookArgs) -> None:
    """One line instead of a traceback when a disk refuses what a background thread (TensorBoard's) writes."""
    if isinstance(failure.exc_value, OSError):
        logging.getLogger(__name__).warning("a background thread could not write: %s", failure.exc_value)
    else:
        threading.__excepthook__(failure)


def start_screen_log(is_main: bool) -> None:
    """Shows messages on rank 0's screen; other ranks are silent."""
    threading.excepthook = _report_thread
    root = logging.getLogger("launch")
    root.setLevel(logging.INFO if is_main else logging.WARNING)
    root.propagate = False
    if is_main:
        handler = _ScreenHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)


def start_file_log(path: Path) -> None:
    """Also appends messages, with their time, to a file that is made at the first one."""
    handler = _FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("launch").addHandler(handler)
