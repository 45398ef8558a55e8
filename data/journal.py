"""`progress.json` in the folder of an unfinished preparation: where to go on when it is killed."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.blocks import BLOCK_BYTES, Position
from data.files import write_file
from data.shards import SplitState

JOURNAL_NAME = "progress.json"
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Journal:
    """A moment of a preparation.

    Attributes:
        purpose: input and options; another preparation cannot go on from here.
        position: in the input.
        counts: so far.
        splits: what is on the disk of each split.
    """

    purpose: Mapping[str, Any]
    position: Position
    counts: Counter[str]
    splits: dict[str, SplitState]

    def write(self, folder: Path) -> None:
        """Replace the folder's journal; the splits must have been saved before."""
        content = {
            "purpose": self.purpose,
            "position": self.position,
            "counts": self.counts,
            "splits": {name: dataclasses.asdict(state) for name, state in self.splits.items()},
            **_code(),
        }
        write_file(folder / JOURNAL_NAME, json.dumps(content, ensure_ascii=False).encode())

    @classmethod
    def read(cls, folder: Path, purpose: Mapping[str, Any]) -> "Journal | None":
        """The folder's journal, if there is one with this purpose."""
        try:
            content = json.loads((folder / JOURNAL_NAME).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        # Through JSON, as the one read has been.
        wanted = json.loads(json.dumps({"purpose": purpose, **_code()}))
        if any(content.get(name) != value for name, value in wanted.items()):
            return None
        splits = {name: SplitState(**state) for name, state in content["splits"].items()}
        return cls(purpose, Position(*content["position"]), Counter(content["counts"]), splits)


def _code() -> dict[str, int]:
    """What positions mean depends on it."""
    return {"format_version": _FORMAT_VERSION, "block_bytes": BLOCK_BYTES}
