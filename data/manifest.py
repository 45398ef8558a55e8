"""`manifest.json`, stored beside the shards: describes them, with hashes to verify that they are intact."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.files import write_file

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
COUNT_NAMES = ("documents", "empty", "skipped", "replaced", "nul", "text_bytes")
_MAX_HINTS = 4
_VOCAB_MULTIPLE = 64  # keeps the rows of the embedding a multiple of the tile size of matrix kernels


@dataclass(frozen=True)
class FileRecord:
    """One file of a source folder: its name, size in bytes and hex xxh3-128 hash."""

    name: str
    size_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """Description of one split of a prepared dataset; each split is a folder.

    Attributes:
        split: This folder's split, "train" or "val".
        splits: All splits that were prepared together; each is a sibling folder of that name.
        num_documents: Total number of documents in the shards.
        num_tokens: Total number of tokens in the shards, including one end-of-document id per document.
        tokenizer_file: Name of the tokenizer file in this folder.
        tokenizer_kind: "sentencepiece" or "huggingface".
        tokenizer_sha256: Hash of the tokenizer file.
        vocab_size: Number of ids that the tokenizer has; every token id is below it.
        padded_vocab_size: `vocab_size` rounded up to a multiple of 64, for the model's embedding.
        eod_id: Id at the end of every document.
        files: Every other file of the folder, with the shards in reading order.
        options: The options of the preparation.
        input: Number, size and hash of the input files, or the dataset's name and version.
        counts: Counts over the whole input, all splits together: "documents" found, "empty" and "skipped" ones among
            them, characters "replaced", "nul" characters dropped, and "text_bytes" used. Empty in old manifests.
        format_version: Version of the manifest's format.
    """

    split: str
    splits: tuple[str, ...]
    num_documents: int
    num_tokens: int
    tokenizer_file: str
    tokenizer_kind: str
    tokenizer_sha256: str
    vocab_size: int
    padded_vocab_size: int
    eod_id: int
    files: tuple[FileRecord, ...]
    options: dict[str, Any]
    input: dict[str, Any]
    counts: dict[str, int] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def shard_names(self) -> list[str]:
        """Names of the shards, without `.bin`, in reading order."""
        return [file.name.removesuffix(".bin") for file in self.files if file.name.endswith(".bin")]

    def write(self, folder: Path) -> None:
        """Write `manifest.json` into `folder`; it appears complete or not at all."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)
        write_file(folder / MANIFEST_NAME, (text + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read `folder`'s manifest.

        Raises:
            DataError: If it is missing, not JSON or of another format version, or if a field is missing, unknown or of
                the wrong type.
        """
        path = folder / MANIFEST_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(f"{path}: no such file; {_hint(folder)}") from None
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(content, dict):
            raise DataError(f"{path}: expected a JSON object, found {type(content).__name__}")
        if content.get("format_version") != FORMAT_VERSION:
            raise DataError(f"{path}: format_version {content.get('format_version')}, expected {FORMAT_VERSION}")
        content.setdefault("counts", {})  # missing in old manifests
        _check_fields(path, content, _FIELD_TYPES)
        for record in content["files"]:
            _check_fields(path, record, _RECORD_TYPES)
        content["files"] = tuple(FileRecord(**record) for record in content["files"])
        content["splits"] = tuple(content["splits"])
        return cls(**content)


def is_unfinished(folder: Path) -> bool:
    """Whether a folder belongs to a preparation that is still running or was killed."""
    names = (folder.absolute().name, folder.absolute().parent.name)
    return any(name.endswith(".partial") for name in names) or any(folder.glob("*.bin.tmp"))


def pad_vocab_size(vocab_size: int) -> int:
    """Round `vocab_size` up to a multiple of 64."""
    return -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


_FIELD_TYPES: Mapping[str, type] = {
    "split": str,
    "splits": list,
    "num_documents": int,
    "num_tokens": int,
    "tokenizer_file": str,
    "tokenizer_kind": str,
    "tokenizer_sha256": str,
    "vocab_size": int,
    "padded_vocab_size": int,
    "eod_id": int,
    "files": list,
    "options": dict,
    "input": dict,
    "counts": dict,
    "format_version": int,
}
_RECORD_TYPES: Mapping[str, type] = {"name": str, "size_bytes": int, "xxh3": str}


def _check_fields(path: Path, content: object, types: Mapping[str, type]) -> None:
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected an object with {', '.join(types)}, found {content!r}")
    if unknown := sorted(content.keys() - types.keys()):
        raise DataError(f"{path}: unknown field {unknown[0]!r}")
    for name, kind in types.items():
        if name not in content:
            raise DataError(f"{path}: field {name!r} is missing")
        if type(content[name]) is not kind:
            raise DataError(f"{path}: field {name!r} is {content[name]!r}, expected {kind.__name__}")


def _hint(folder: Path) -> str:
    """Suggest where the shards may be instead."""
    if is_unfinished(folder):
        return "this is an unfinished preparation; run the same command again to resume it"
    if found := sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{MANIFEST_NAME}")):
        more = " or ..." if len(found) > _MAX_HINTS else ""
        return f"did you mean {' or '.join(map(str, found[:_MAX_HINTS]))}{more}?"
    return "expected a folder written by data.prepare, a folder of .bin/.idx pairs, or one such pair without its suffix"
