"""Locks that keep a second process out of a folder; the operating system releases them when their process ends."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from launch.errors import RunError
from launch.run_folder.folder import RunFolder, is_own_file


class LockedError(Exception):
    """Another process holds the lock; the message is the name that it left in the lock file."""


@contextlib.contextmanager
def file_lock(path: Path, timeout_seconds: float = 0.0) -> Iterator[None]:
    """Holds the lock of a file, in which it leaves the name of this host and process.

    On a file system without locks it does nothing.

    Raises:
        LockedError: another process holds it for longer than the timeout.
    """
    lock = FileLock(path, mode=0o644, on_acquired=_write_holder, preserve_lock_file=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.acquire(timeout=timeout_seconds))
        except Timeout:
            raise LockedError(path.read_text(encoding="utf-8", errors="replace").strip()) from None
        except (NotImplementedError, OSError):
            pass  # a file system without locks
        yield


class FolderLock:
    """Keeps a second run out of a folder for as long as the process holds it. For rank 0."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._held = contextlib.ExitStack()

    def acquire(self) -> None:
        """Makes the folder if need be and locks it.

        Raises:
            RunError: the folder cannot be made, is not a run's, or another process is training in it.
        """
        path = self._folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            stray = sorted(entry.name for entry in path.iterdir() if not is_own_file(entry.name))
        except OSError as error:
            raise RunError(f"run.dir: the run's folder {path} cannot be made: {error}") from None
        if stray and not self._folder.config.exists():
            raise RunError(f"{path}: is not a run's folder, it holds {stray[0]}; choose another run.name or run.dir")
        try:
            self._held.enter_context(file_lock(self._folder.lock))
        except LockedError as error:
            raise RunError(f"{path}: another run is training in it ({error}); choose another run.name") from None

    def close(self) -> None:
        """Lets other runs in."""
        self._held.close()


def _write_holder(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
