"""What a run's folder tells about a run, seen from another process: plain files, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def done_step(folder: Path) -> int | None:
    """The last step in the completion marker; None when there is no (readable) marker."""
    try:
        return int(json.loads((folder / "DONE").read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl; a kill may have cut off the last one."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


class Progress:
    """The last step that the start under way has recorded.

    Every start of a run rewrites metrics.jsonl; until then, what is in the file is an earlier start's. To be made
    before the start.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._old_inode = self._path.stat().st_ino if self._path.exists() else None
        self._size_bytes = -1
        self._step = 0

    def last_step(self) -> int:
        """0 as long as this start has recorded nothing."""
        try:
            found = self._path.stat()
            if found.st_ino == self._old_inode or found.st_size == self._size_bytes:
                return self._step
            self._size_bytes = found.st_size
            with self._path.open("rb") as stream:
                stream.seek(max(0, found.st_size - (1 << 16)))
                lines = stream.read().split(b"\n")[:-1]
            self._step = int(json.loads(lines[-1])["step"]) if lines else 0
        except (OSError, ValueError):
            pass  # it is being written; the next look is soon
        return self._step
