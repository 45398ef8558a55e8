"""Locks that keep a second process out of a sweep or a cell; released when the process that holds them ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from launch.errors import RunError
from launch.run_folder.lock import LockedError, file_lock
from launch.sweep.cells import Cell
from launch.sweep.outcome import LOGS
from launch.sweep.spec import Sweep

WAIT_SECONDS = 0.5


@contextlib.contextmanager
def locked(sweep: Sweep) -> Iterator[None]:
    """Locks the sweep's folder. Raises RunError if another sweep is running in it."""
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(sweep.folder / "lock"))
        except LockedError:
            raise RunError(f"{sweep.folder}: another sweep is running in it; choose another name") from None
        yield


@contextlib.contextmanager
def cell_locked(sweep: Sweep, cell: Cell, requests: Sequence[int]) -> Iterator[None]:
    """Waits until no other process runs the cell, or until there is a request.

    A cell outlives a killed sweep until it has saved, and the sweep may have been started again by then.
    """
    path = sweep.folder / LOGS / f"{cell.name}.lock"
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(file_lock(path, WAIT_SECONDS))
            except LockedError:
                if not requests:
                    continue
            break
        yield
