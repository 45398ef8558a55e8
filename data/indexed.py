"""The shard format, Megatron's indexed dataset: `NAME.bin` holds tokens, `NAME.idx` is the index of documents.

    NAME.bin    tokens of all sequences back to back, little-endian, no header
    NAME.idx    magic "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | S u64 | D u64
                lengths   int32[S]   tokens of each sequence
                pointers  int64[S]   byte at which each sequence starts in NAME.bin
                documents int64[D]   sequence at which each document starts, and S as the last entry

A document is one or more sequences; D is therefore the number of documents plus one. The layout is that of
`megatron/core/datasets/indexed_dataset.py` in Megatron-LM.
"""

import os
import struct
from array import array
from bisect import bisect_left, bisect_right
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import numpy as np

from data.errors import DataError
from data.files import sync, write_file

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
_UINT16_VOCAB_LIMIT = 65_500  # Megatron's `optimal_dtype`
_MAX_SEQUENCE_TOKENS = 2**31 - 1
_CHECK_CHUNK_ENTRIES = 1 << 22


def bin_path(prefix: Path) -> Path:
    """`NAME` → `NAME.bin`; a dot inside NAME is part of the name."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`NAME` → `NAME.idx`; a dot inside NAME is part of the name."""
    return prefix.with_name(prefix.name + ".idx")


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron uses for a vocabulary: uint16 below 65,500 ids, int32 from there on."""
    return np.dtype("<u2") if vocab_size < _UINT16_VOCAB_LIMIT else np.dtype("<i4")


class IndexedShard:
    """One shard, memory-mapped and read-only: a flat stream of tokens divided into documents.

    Attributes:
        prefix: Path without `.bin` and `.idx`.
        dtype: Type of a token on disk.
        num_tokens: Number of tokens in the shard.
        num_documents: Number of documents in the shard, including empty ones.
    """

    def __init__(
        self,
        prefix: Path,
        tokens: np.ndarray,
        pointers: np.ndarray,
        documents: np.ndarray,
        is_sequence_per_document: bool,
    ) -> None:
        """Called by `open`, which checks that the three arrays are consistent."""
        self.prefix = prefix
        self.dtype = tokens.dtype
        self.num_tokens = len(tokens)
        self.num_documents = len(documents) - 1
        self._tokens = tokens
        self._pointers = pointers
        self._documents = documents
        self._is_sequence_per_document = is_sequence_per_document

    @classmethod
    def open(cls, prefix: str | Path) -> "IndexedShard":
        """Map a shard and check that its two files are consistent.

        Reads the whole `.idx` once (12 bytes per sequence, in bounded memory) and none of the tokens.

        Raises:
            DataError: If a file is missing, truncated, too long, in another format, or inconsistent.
        """
        prefix = Path(prefix)
        index, tokens_file = idx_path(prefix), bin_path(prefix)
        num_index_bytes, num_token_bytes = _size_bytes(index), _size_bytes(tokens_file)

        dtype, num_sequences, num_entries = _read_header(index, num_index_bytes)
        expected_bytes = _HEADER.size + 12 * num_sequences + 8 * num_entries
        if num_index_bytes != expected_bytes:
            raise DataError(
                f"{index}: {num_index_bytes:,} bytes found, {expected_bytes:,} expected for "
                f"{num_sequences:,} sequences and {num_entries:,} document entries"
            )
        lengths = _map(index, np.dtype("<i4"), num_sequences, _HEADER.size)
        pointers = _map(index, np.dtype("<i8"), num_sequences, _HEADER.size + 4 * num_sequences)
        documents = _map(index, np.dtype("<i8"), num_entries, _HEADER.size + 12 * num_sequences)

        expected_bytes = _check_pointers(index, lengths, pointers, dtype.itemsize)
        if num_token_bytes != expected_bytes:
            raise DataError(
                f"{tokens_file}: {num_token_bytes:,} bytes found, {expected_bytes:,} expected by {index.name}"
            )
        is_sequence_per_document = _check_documents(index, documents, num_sequences)
        tokens = _map(tokens_file, dtype, num_token_bytes // dtype.itemsize, 0)
        return cls(prefix, tokens, pointers, documents, is_sequence_per_document)

    @cached_property
    def document_offsets(self) -> np.ndarray:
        """The token at which each document starts, and `num_tokens` as the last entry: int64 [num_documents + 1].

        Document i is `read(document_offsets[i], document_offsets[i + 1])`.
        """
        sequence_starts = np.append(self._pointers // self.dtype.itemsize, self.num_tokens)
        return sequence_starts[self._documents]

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens among start … stop - 1 at which documents start, ascending: int64 [N].

        A token at which empty documents start too is listed more than once. Reads only the part of the index it needs.
        """
        # Not np.searchsorted: the arrays are unaligned in the file, so it would copy them as a whole.
        first = bisect_left(self._pointers, start * self.dtype.itemsize)
        last = _bisect_near(self._pointers, stop * self.dtype.itemsize, first)
        if self._is_sequence_per_document:
            return self._pointers[first:last] // self.dtype.itemsize
        first_document = bisect_left(self._documents, first)
        last_document = _bisect_near(self._documents, last, first_document)
        return self._pointers[self._documents[first_document:last_document]] // self.dtype.itemsize

    def document_of(self, token: int) -> int:
        """Return the number of the document that a token belongs to, from 0."""
        sequence = bisect_right(self._pointers, token * self.dtype.itemsize) - 1
        if self._is_sequence_per_document:
            return sequence
        return bisect_right(self._documents, sequence) - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start … stop - 1 as a read-only view of the file: [stop - start] of `dtype`."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start:,} to {stop:,} of a shard with {self.num_tokens:,}")
        return self._tokens[start:stop]


class IndexedShardWriter:
    """Writes one shard, document by document; `close` completes it and gives the files their names.

    Until then the files have a `.tmp` suffix, and an exception in the `with` block removes them.
    Uses four bytes of memory per document.

    Attributes:
        prefix: Path without `.bin` and `.idx`.
        dtype: Type of a token on disk.
        num_tokens: Number of tokens added so far.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self._begin(Path(prefix), np.dtype(dtype), array("i"), 0, "wb")

    @classmethod
    def resume(cls, prefix: str | Path, dtype: np.dtype, num_documents: int, num_tokens: int) -> "IndexedShardWriter":
        """Continue a shard that another process left unfinished, after its first `num_documents` documents.

        These must have been written before a call of `save`. Everything that the process did later is undone, even
        `close`. If this process is killed in turn, the same call can be repeated.

        Raises:
            DataError: If the files contain less than that.
        """
        prefix, dtype = Path(prefix), np.dtype(dtype)
        saved, tokens_file = _temporary(prefix, "lengths"), _temporary(prefix, "bin")
        if idx_path(prefix).exists():
            write_file(saved, np.fromfile(idx_path(prefix), "<i4", num_documents, offset=_HEADER.size).tobytes())
            idx_path(prefix).unlink()
        if bin_path(prefix).exists():
            bin_path(prefix).replace(tokens_file)
        lengths = np.fromfile(saved, "<i4", num_documents) if saved.exists() else np.empty(0, "<i4")
        num_bytes = num_tokens * dtype.itemsize
        if len(lengths) != num_documents or lengths.sum() != num_tokens or _size_bytes(tokens_file) < num_bytes:
            raise DataError(
                f"{tokens_file}: expected {num_documents:,} documents with {num_tokens:,} tokens; some are missing"
            )
        os.truncate(saved, lengths.nbytes)
        os.truncate(tokens_file, num_bytes)
        writer = cls.__new__(cls)
        writer._begin(prefix, dtype, array("i", lengths.tobytes()), num_tokens, "ab")
        return writer

    def _begin(self, prefix: Path, dtype: np.dtype, lengths: "array[int]", num_tokens: int, mode: str) -> None:
        self.prefix = prefix
        self.dtype = dtype
        self.num_tokens = num_tokens
        self._lengths = lengths
        self._num_saved = len(lengths)
        self._bin_temporary, self._idx_temporary = _temporary(prefix, "bin"), _temporary(prefix, "idx")
        self._saved_lengths = _temporary(prefix, "lengths")
        self._bin_file = cast(BinaryIO, self._bin_temporary.open(mode, buffering=1 << 20))

    @property
    def temporary_files(self) -> tuple[Path, ...]:
        """The files that exist until the shard is closed."""
        return self._bin_temporary, self._idx_temporary, self._saved_lengths

    @property
    def num_documents(self) -> int:
        """Number of documents added so far."""
        return len(self._lengths)

    def add_document(self, tokens: np.ndarray) -> None:
        """Append one document, possibly empty, as one sequence.

        Args:
            tokens: Ids [num_tokens] of any integer dtype; the values must fit the shard's dtype.

        Raises:
            DataError: If an id does not fit the shard's dtype, or the document has 2³¹ tokens or more.
        """
        if len(tokens) > _MAX_SEQUENCE_TOKENS:
            raise DataError(
                f"{self.prefix}: a document of {len(tokens):,} tokens, at most {_MAX_SEQUENCE_TOKENS:,} are possible"
            )
        stored = tokens.astype(self.dtype, copy=False)
        if stored.dtype != tokens.dtype and not np.array_equal(stored, tokens):
            raise DataError(f"{self.prefix}: token ids {tokens.min():,} to {tokens.max():,} do not fit {self.dtype}")
        self._bin_file.write(stored.tobytes())
        self._lengths.append(len(tokens))
        self.num_tokens += len(tokens)

    def save(self) -> None:
        """Flush all documents so far to disk, so that `resume` finds them if this process is killed."""
        _flush_to_disk(self._bin_file)
        with self._saved_lengths.open("ab" if self._num_saved else "wb") as file:
            file.write(self._lengths[self._num_saved :].tobytes())
            _flush_to_disk(file)
        sync(self.prefix.parent)
        self._num_saved = len(self._lengths)

    def close(self) -> None:
        """Write the index, flush both files to disk and rename them, the index last."""
        _flush_to_disk(self._bin_file)
        self._bin_file.close()
        with self._idx_temporary.open("wb") as file:
            self._write_index(file)
            _flush_to_disk(file)
        self._bin_temporary.replace(bin_path(self.prefix))
        self._idx_temporary.replace(idx_path(self.prefix))
        sync(self.prefix.parent)
        self._saved_lengths.unlink(missing_ok=True)

    def release(self) -> None:
        """Close the unfinished files and keep them for `resume`."""
        with suppress(OSError):  # the disk may be too full for what is still buffered
            self._bin_file.close()

    def abort(self) -> None:
        """Remove the unfinished files."""
        self.release()
        for path in self.temporary_files:
            path.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.array(self._lengths, dtype="<i4")
        stops = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        num_sequences = len(lengths)
        code = _CODE_OF_DTYPE[self.dtype]
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, num_sequences, num_sequences + 1))
        file.write(lengths.tobytes())
        file.write((stops - lengths.astype("<i8") * self.dtype.itemsize).tobytes())
        file.write(np.arange(num_sequences + 1, dtype="<i8").tobytes())


def _size_bytes(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"{path}: no such file; a shard consists of a .bin and an .idx file of the same name")
    return path.stat().st_size


def _read_header(index: Path, num_bytes: int) -> tuple[np.dtype, int, int]:
    """Return (token dtype, number of sequences, number of document entries) of an `.idx` file."""
    if num_bytes < _HEADER.size:
        raise DataError(f"{index}: {num_bytes:,} bytes found, expected a header of {_HEADER.size}")
    with index.open("rb") as file:
        magic, version, code, num_sequences, num_entries = _HEADER.unpack(file.read(_HEADER.size))
    if magic != _MAGIC:
        raise DataError(f"{index}: starts with {magic!r}, expected {_MAGIC!r}: not a Megatron index")
    if version != _VERSION:
        raise DataError(f"{index}: format version {version}, expected {_VERSION}")
    dtype = _DTYPE_OF_CODE.get(code)
    if dtype is None or dtype.kind == "f":
        raise DataError(f"{index}: dtype code {code} is not an integer type")
    return dtype, num_sequences, num_entries


def _map(path: Path, dtype: np.dtype, count: int, offset_bytes: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, dtype)  # an empty range cannot be mapped
    # As a plain array: slicing an np.memmap takes several times as long.
    return np.memmap(path, dtype, "r", offset_bytes, (count,)).view(np.ndarray)


def _check_pointers(index: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Check that the sequences lie back to back, and return the size that the `.bin` must have."""
    num_bytes = 0
    for first in range(0, len(lengths), _CHECK_CHUNK_ENTRIES):
        sizes_bytes = lengths[first : first + _CHECK_CHUNK_ENTRIES].astype(np.int64) * itemsize
        stops = num_bytes + np.cumsum(sizes_bytes)
        wrong = (pointers[first : first + _CHECK_CHUNK_ENTRIES] != stops - sizes_bytes) | (sizes_bytes < 0)
        if wrong.any():
            sequence = first + int(wrong.argmax())
            raise DataError(
                f"{index}: sequence {sequence:,} has {lengths[sequence]:,} tokens at byte "
                f"{pointers[sequence]:,}; expected byte {(stops - sizes_bytes)[sequence - first]:,}"
            )
        num_bytes = int(stops[-1])
    return num_bytes


def _check_documents(index: Path, documents: np.ndarray, num_sequences: int) -> bool:
    """Check that the documents are in order, and return whether each of them is a single sequence."""
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != num_sequences:
        raise DataError(f"{index}: document entries do not run from 0 to the {num_sequences:,} sequences")
    is_sequence_per_document = True
    for first in range(0, len(documents), _CHECK_CHUNK_ENTRIES):
        steps = np.diff(documents[first : first + _CHECK_CHUNK_ENTRIES + 1])
        if (steps < 0).any():
            entry = first + int((steps < 0).argmax())
            raise DataError(
                f"{index}: document {entry:,} starts at sequence {documents[entry]:,}, "
                f"but the next one starts before it, at {documents[entry + 1]:,}"
            )
        is_sequence_per_document &= bool((steps == 1).all())
    return is_sequence_per_document


def _bisect_near(values: np.ndarray, wanted: int, start: int) -> int:
    """Return `bisect_left(values, wanted, lo=start)`, quickly if the result is near `start`."""
    distance = 8
    while start + distance < len(values) and values[start + distance] < wanted:
        distance *= 2
    return bisect_left(values, wanted, start, min(start + distance, len(values)))


def _temporary(prefix: Path, kind: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{kind}.tmp")


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
