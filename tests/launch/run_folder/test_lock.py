"""A lock keeps a second process out, names its holder, and goes when the holder is killed."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.errors import RunError
from launch.run_folder.folder import RunFolder
from launch.run_folder.lock import FolderLock, LockedError, file_lock
from tests.conftest import ROOT

HOLD = """
import sys, time
from pathlib import Path
from launch.run_folder.folder import RunFolder
from launch.run_folder.lock import FolderLock
lock = FolderLock(RunFolder(Path(sys.argv[1])))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of the run's folder `tmp_path / "run"`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_with_the_holders_name_until_the_holder_is_killed(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    name = f"host {socket.gethostname()}, process {holder.pid}"
    lock = FolderLock(folder)
    with pytest.raises(RunError) as refused:
        lock.acquire()
    assert str(refused.value).startswith(f"{folder.path}: another run is training in it ({name}); ")
    begin = time.monotonic()
    with pytest.raises(LockedError, match=f"^{name}$"), file_lock(folder.lock, timeout_seconds=0.3):
        pass
    assert time.monotonic() - begin >= 0.3
    holder.kill()
    holder.wait()
    lock.acquire()  # the lock file is still there, and free
    assert folder.lock.read_text() != f"{name}\n"
    lock.close()


def test_a_closed_lock_lets_the_next_one_in(tmp_path: Path) -> None:
    first, second = FolderLock(RunFolder(tmp_path / "run")), FolderLock(RunFolder(tmp_path / "run"))
    first.acquire()
    with pytest.raises(RunError, match="another run is training in it"):
        second.acquire()
    first.close()
    second.acquire()
    second.close()


def test_a_folder_of_something_else_is_neither_locked_nor_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunError, match=r"it contains thesis\.tex"):
        FolderLock(RunFolder(tmp_path)).acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunError, match=r"run\.dir: .* cannot be created"):
        FolderLock(RunFolder(tmp_path / "thesis.tex/run")).acquire()


def test_a_lock_that_cannot_be_opened_is_an_error_and_not_a_missing_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.lock.mkdir(parents=True)
    with pytest.raises(RunError, match="run/lock: cannot be locked: "):
        FolderLock(folder).acquire()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError()])
def test_a_file_system_without_locks_is_used_with_a_warning(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("filelock.FileLock.acquire", no_locks)
    with file_lock(tmp_path / "lock"):
        pass
    assert caplog.messages == [
        f"{tmp_path / 'lock'}: this file system has no locks; nothing keeps a second process out"
    ]
