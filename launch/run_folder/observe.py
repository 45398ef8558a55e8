"""Reads the state of a run from its folder, from another process and without importing torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def done_step(folder: Path) -> int | None:
    """The last step in the completion marker; None if there is no readable marker."""
    try:
        return int(json.loads((folder / "DONE").read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records in metrics.jsonl, without an incomplete last line, which a kill may leave."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


class Progress:
    """The last step that the current start of a run has recorded.

    Every start rewrites metrics.jsonl; until then the file is an earlier start's. Create this object before the start.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._old_inode = self._path.stat().st_ino if self._path.exists() else None
        self._size_bytes = -1
        self._step = 0

    def last_step(self) -> int:
        """The last recorded step; 0 until this start has recorded one."""
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
            pass  # the file is being written; the next call reads it again
        return self._step
