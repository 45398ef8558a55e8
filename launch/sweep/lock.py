"""Locks that keep a second process out of a sweep or a cell; they end with the process that holds them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import time
from collections.abc import Iterator, Sequence
from typing import IO

from launch.errors import RunError
from launch.sweep.cells import Cell
from launch.sweep.outcome import LOGS
from launch.sweep.spec import Sweep

WAIT_SECONDS = 0.5


@contextlib.contextmanager
def locked(sweep: Sweep) -> Iterator[None]:
    """Keeps a second sweep out of the folder. Raises RunError when another one is in it."""
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with (sweep.folder / "lock").open("a") as stream:
        if not _acquire(stream):
            raise RunError(f"{sweep.folder}: another sweep is running in it; choose another name")
        yield


@contextlib.contextmanager
def cell_locked(sweep: Sweep, cell: Cell, requests: Sequence[int]) -> Iterator[None]:
    """Waits until no other process runs the cell, or until there is a request.

    A cell outlives a killed sweep by the time that it takes to save, and the sweep may have been started again by then.
    """
    with (sweep.folder / LOGS / f"{cell.name}.lock").open("a") as stream:
        while not _acquire(stream) and not requests:
            time.sleep(WAIT_SECONDS)
        yield


def _acquire(stream: IO[str]) -> bool:
    """Whether the file is locked now; True too on a file system without locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
