"""`progress.json` in the folder of an unfinished preparation: the point from which it can be resumed."""

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
    """The state of a preparation at one moment.

    Attributes:
        purpose: Input and options; only a preparation with the same ones can resume from here.
        position: The position in the input.
        counts: The counts so far.
        splits: How much of each split has been saved to disk.
    """

    purpose: Mapping[str, Any]
    position: Position
    counts: Counter[str]
    splits: dict[str, SplitState]

    def write(self, folder: Path) -> None:
        """Replace the folder's journal; call this after the splits were saved."""
        content = {
            "purpose": self.purpose,
            "position": self.position,
            "counts": self.counts,
            "splits": {name: dataclasses.asdict(state) for name, state in self.splits.items()},
            **_format(),
        }
        write_file(folder / JOURNAL_NAME, json.dumps(content, ensure_ascii=False).encode())

    @classmethod
    def read(cls, folder: Path, purpose: Mapping[str, Any]) -> "Journal | None":
        """Return the folder's journal, or None if there is none with this purpose."""
        try:
            content = json.loads((folder / JOURNAL_NAME).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        # Converted to JSON and back, like the content that was read.
        wanted = json.loads(json.dumps({"purpose": purpose, **_format()}))
        if any(content.get(name) != value for name, value in wanted.items()):
            return None
        splits = {name: SplitState(**state) for name, state in content["splits"].items()}
        return cls(purpose, Position(*content["position"]), Counter(content["counts"]), splits)


def _format() -> dict[str, int]:
    """Return the values that the meaning of a position depends on."""
    return {"format_version": _FORMAT_VERSION, "block_bytes": BLOCK_BYTES}
