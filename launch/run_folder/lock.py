"""Locks that keep a second process out of a folder. The operating system releases them when the process ends."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from launch.errors import RunError
from launch.run_folder.folder import RunFolder, is_own_file

log = logging.getLogger(__name__)

# What locking fails with on a file system without locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class LockedError(Exception):
    """Another process holds the lock; the message is the content of the lock file, which names that process."""


@contextlib.contextmanager
def file_lock(path: Path, timeout_seconds: float = 0.0) -> Iterator[None]:
    """Holds the lock of a file, and writes this host and process into it.

    On a file system without locks it only logs a warning.

    Raises:
        LockedError: Another process has held the lock for longer than the timeout.
        OSError: The lock file cannot be opened.
    """
    lock = FileLock(path, mode=0o644, on_acquired=_write_holder, preserve_lock_file=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.acquire(timeout=timeout_seconds))
        except Timeout:
            raise LockedError(path.read_text(encoding="utf-8", errors="replace").strip()) from None
        except (NotImplementedError, OSError) as error:  # filelock raises the first for ENOSYS
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            log.warning("%s: this file system has no locks; nothing keeps a second process out", path)
        yield


class FolderLock:
    """The lock of a run's folder, which keeps a second run out. For rank 0."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._held = contextlib.ExitStack()

    def acquire(self) -> None:
        """Creates the folder if necessary and locks it.

        Raises:
            RunError: The folder cannot be created or is not a run's, or another process is training in it.
        """
        path = self._folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            stray = sorted(entry.name for entry in path.iterdir() if not is_own_file(entry.name))
        except OSError as error:
            raise RunError(f"run.dir: the run's folder {path} cannot be created: {error}") from None
        if stray and not self._folder.config.exists():
            raise RunError(
                f"{path}: is not a run's folder (it contains {stray[0]}); choose another run.name or run.dir"
            )
        try:
            self._held.enter_context(file_lock(self._folder.lock))
        except LockedError as error:
            raise RunError(f"{path}: another run is training in it ({error}); choose another run.name") from None
        except OSError as error:
            raise RunError(f"{self._folder.lock}: cannot be locked: {error}") from None

    def close(self) -> None:
        """Releases the lock."""
        self._held.close()


def _write_holder(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the name is for people; a full disk must not cost the lock
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
