"""Whether all nodes see one folder: rank 0 leaves a file there, and the others answer with files of their own."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

VISIBLE_SECONDS = 5.0  # until a network file system must show a new file


class SharedFolder:
    """The folder that holds the run's folder, which is made if need be.

    Args:
        folder: as this rank names it.

    Attributes:
        folder: the same.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leave(self) -> tuple[str, str | None]:
        """For rank 0: (name of a new file, None), or ("", why it cannot be written)."""
        token = f".preflight-{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / token).touch()
        except OSError as error:
            return "", error.strerror or str(error)
        return token, None

    def answer(self, token: str, rank: int) -> str | None:
        """For the others: None, "unseen" where the file does not show, or why the answer cannot be written."""
        if not _appears(self.folder / token, VISIBLE_SECONDS):
            return "unseen"
        try:
            (self.folder / f"{token}.{rank}").touch()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def take_back(self, token: str, ranks: Sequence[int]) -> list[int]:
        """For rank 0: removes all files, and returns the ranks whose answer does not show."""
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
