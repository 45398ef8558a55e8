"""Writes the shards of one split: a new one whenever the last is full, and a manifest at the end."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.command_line import Progress
from data.errors import DataError
from data.files import hash_file, write_file
from data.indexed import IndexedShard, IndexedShardWriter, bin_path, idx_path
from data.manifest import COUNT_NAMES, FileRecord, Manifest, pad_vocab_size
from data.tokenizer import Tokenizer


@dataclass(frozen=True)
class SplitState:
    """How much of a split has been written.

    Attributes:
        num_documents: Number of documents in all shards.
        num_tokens: Number of tokens in all shards.
        num_full_shards: Number of finished shards.
        open_documents: Number of documents in the unfinished shard.
        open_tokens: Number of tokens in the unfinished shard.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_full_shards: int = 0
    open_documents: int = 0
    open_tokens: int = 0


class SplitWriter:
    """Writes the documents of one split to shards `SPLIT-00000`, `SPLIT-00001`, … in a folder.

    Attributes:
        folder: The folder, which is created if necessary.
        split: "train" or "val".
        num_documents: Number of documents written so far.
        num_tokens: Number of tokens written so far.
        prefixes: Prefixes of the shards so far.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.split = split
        self.num_documents = 0
        self.num_tokens = 0
        self.prefixes: list[Path] = []
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._shard: IndexedShardWriter | None = None

    @classmethod
    def resume(cls, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, state: SplitState) -> "SplitWriter":
        """Continue from a state that `save` returned for this folder, and remove everything written later.

        Raises:
            DataError: If the folder contains less than the state describes.
        """
        writer = cls(folder, split, dtype, shard_tokens)
        writer.num_documents, writer.num_tokens = state.num_documents, state.num_tokens
        writer.prefixes = [writer._prefix(number) for number in range(state.num_full_shards)]
        num_tokens = state.open_tokens + sum(IndexedShard.open(prefix).num_tokens for prefix in writer.prefixes)
        if num_tokens != state.num_tokens:
            raise DataError(f"{folder}: {num_tokens:,} tokens in the shards, but {state.num_tokens:,} were written")
        kept = {path.name for prefix in writer.prefixes for path in (bin_path(prefix), idx_path(prefix))}
        if state.open_documents:
            prefix = writer._prefix(state.num_full_shards)
            writer._shard = IndexedShardWriter.resume(prefix, dtype, state.open_documents, state.open_tokens)
            writer.prefixes.append(prefix)
            kept |= {path.name for path in writer._shard.temporary_files}
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink()
        return writer

    def save(self) -> SplitState:
        """Flush everything so far to disk, and return the state for `resume`."""
        if self._shard is None:
            return SplitState(self.num_documents, self.num_tokens, len(self.prefixes))
        self._shard.save()
        return SplitState(
            self.num_documents,
            self.num_tokens,
            len(self.prefixes) - 1,
            self._shard.num_documents,
            self._shard.num_tokens,
        )

    def add_document(self, tokens: np.ndarray) -> None:
        """Append a document [num_tokens], to a new shard if it would take the current one beyond the limit."""
        if self._shard is not None and self._shard.num_tokens + len(tokens) > self._shard_tokens:
            self.close_shard()
        if self._shard is None:
            prefix = self._prefix(len(self.prefixes))
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

    def release(self) -> None:
        """Close the last shard unfinished, for `resume`."""
        if self._shard is not None:
            self._shard.release()

    def write_manifest(
        self,
        splits: list[str],
        tokenizer: Tokenizer,
        eod_id: int,
        options: dict[str, Any],
        input_record: dict[str, Any],
        counts: Counter[str],
    ) -> None:
        """Write the tokenizer and the manifest, which completes the folder."""
        write_file(self.folder / tokenizer.file_name, tokenizer.content)
        Manifest(
            split=self.split,
            splits=tuple(splits),
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            tokenizer_file=tokenizer.file_name,
            tokenizer_kind=tokenizer.kind,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            padded_vocab_size=pad_vocab_size(tokenizer.vocab_size),
            eod_id=eod_id,
            files=tuple(self._hash_files()),
            options=options,
            input=input_record,
            counts={name: counts[name] for name in COUNT_NAMES},
        ).write(self.folder)

    def _prefix(self, number: int) -> Path:
        return self.folder / f"{self.split}-{number:05d}"

    def _hash_files(self) -> list[FileRecord]:
        paths = [path for prefix in self.prefixes for path in (bin_path(prefix), idx_path(prefix))]
        sizes_bytes = [path.stat().st_size for path in paths]
        records = []
        with Progress(f"hashing {self.split}", sum(sizes_bytes)) as progress:
            for path, size_bytes in zip(paths, sizes_bytes, strict=True):
                records.append(FileRecord(path.name, size_bytes, hash_file(path)))
                progress.update(sum(record.size_bytes for record in records))
        return records
