"""Checks that all nodes see the same folder: rank 0 writes a file there, and the others acknowledge it with files."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

VISIBLE_SECONDS = 5.0  # until a network file system must show a new file


class SharedFolder:
    """The folder that contains the run's folder; created if necessary.

    Args:
        folder: Its path on this rank.

    Attributes:
        folder: The same.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_token(self) -> tuple[str, str | None]:
        """On rank 0: writes a new file. Returns (its name, None), or ("", why it cannot be written)."""
        token = f".preflight-{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / token).touch()
        except OSError as error:
            return "", error.strerror or str(error)
        return token, None

    def acknowledge(self, token: str, rank: int) -> str | None:
        """On other ranks: waits for rank 0's file and writes another one.

        Returns:
            None, "unseen" if the file does not appear, or why the other one cannot be written.
        """
        if not _appears(self.folder / token, VISIBLE_SECONDS):
            return "unseen"
        try:
            (self.folder / f"{token}.{rank}").touch()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def clean_up(self, token: str, ranks: Sequence[int]) -> list[int]:
        """On rank 0: removes all files. Returns the ranks whose file did not appear."""
        unseen = [rank for rank in ranks if not _appears(self.folder / f"{token}.{rank}", VISIBLE_SECONDS)]
        for path in self.folder.glob(f"{token}*"):
            with contextlib.suppress(OSError):
                path.unlink()
        return unseen


def _appears(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
