"""The shards of one split: a new one whenever the last is full, and a manifest at the end."""

from pathlib import Path
from typing import Any

import numpy as np

from data.files import hash_file, write_file
from data.indexed import IndexedShardWriter, bin_path, idx_path
from data.manifest import FileRecord, Manifest, pad_vocab_size
from data.tokenizer import Tokenizer

TOKENIZER_NAME = "tokenizer.model"


class SplitWriter:
    """Writes the documents of one split into shards `SPLIT-00000`, `SPLIT-00001`, … of a new folder.

    Attributes:
        folder: the folder made.
        split: "train" or "val".
        num_documents, num_tokens: written so far.
        prefixes: the shards so far.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.split = split
        self.num_documents = 0
        self.num_tokens = 0
        self.prefixes: list[Path] = []
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._shard: IndexedShardWriter | None = None

    def add_document(self, tokens: np.ndarray) -> None:
        """Append a document [num_tokens]; in a new shard if it would take this one beyond the limit."""
        if self._shard is not None and self._shard.num_tokens + len(tokens) > self._shard_tokens:
            self.close_shard()
        if self._shard is None:
            prefix = self.folder / f"{self.split}-{len(self.prefixes):05d}"
            self._shard = IndexedShardWriter(prefix, self._dtype)
            self.prefixes.append(prefix)
        self._shard.add_document(tokens)
        self.num_documents += 1
        self.num_tokens += len(tokens)

    def close_shard(self) -> None:
        """Finish the last shard."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def write_manifest(
        self, splits: list[str], tokenizer: Tokenizer, options: dict[str, Any], input_record: dict[str, Any]
    ) -> None:
        """Add the tokenizer and the manifest; the folder is then complete."""
        write_file(self.folder / TOKENIZER_NAME, tokenizer.path.read_bytes())
        paths = [path for prefix in self.prefixes for path in (bin_path(prefix), idx_path(prefix))]
        Manifest(
            split=self.split,
            splits=tuple(splits),
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            tokenizer_file=TOKENIZER_NAME,
            tokenizer_kind=tokenizer.kind,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            padded_vocab_size=pad_vocab_size(tokenizer.vocab_size),
            eod_id=tokenizer.eod_id,
            files=tuple(FileRecord(path.name, path.stat().st_size, hash_file(path)) for path in paths),
            options=options,
            input=input_record,
        ).write(self.folder)
