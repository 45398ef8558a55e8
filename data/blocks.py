"""Splits inputs into blocks of about a megabyte, which any process can read independently of the others.

    file  --read, decompress, decode-->  chunks  --split between documents-->  blocks  --readers.py-->  documents

Splitting is fast and happens in one process, in order; the processes that read the blocks do the rest. A document is
never split: however large it is, it lies in a single block.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from data.errors import DataError
from data.inputs import InputFile
from data.json_values import read_json_values
from data.streams import Chunk, open_seekable, read_chunks, to_utf8

DOCUMENT_UNITS = ("file", "line", "block")
ERROR_POLICIES = ("stop", "skip", "replace")
NEWLINES = ("unify", "keep")
BLOCK_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"[\r\n][ \t\f\v]+[\r\n]")
_MAX_BLANK_LINE_BYTES = 256  # a longer one ends a document, but the file is not split there
_ROWS_PER_BATCH = 64
_Text = bytes | str | None


@dataclass(frozen=True)
class ReadOptions:
    """How inputs are read.

    Attributes:
        document_per: What counts as a document in a text file: the whole "file", each "line" or each "block" of lines
            (up to a blank line).
        text_key: The key or column that contains the text, in all formats but plain text.
        encoding: The encoding of text and JSON files, as named by `streams.check_encoding`.
        on_error: What to do about bytes that cannot be decoded, and records without text: "stop", "skip" the
            document, or "replace" the bytes with U+FFFD (and stop at a record without text).
        newlines: "unify" turns "\\r\\n" and "\\r" into "\\n"; "keep" leaves them unchanged.
    """

    document_per: str = "file"
    text_key: str = "text"
    encoding: str = "utf-8"
    on_error: str = "stop"
    newlines: str = "unify"


class TextBlock(NamedTuple):
    """Part of a text file: UTF-8 `content` that begins at byte `start_byte` of file `path`."""

    path: Path
    content: bytes
    start_byte: int

    @property
    def num_bytes(self) -> int:
        """Size of the content."""
        return len(self.content)


class JsonLinesBlock(NamedTuple):
    """Lines of a JSON Lines file: UTF-8 `content` that begins at byte `start_byte`, in line `first_line` (from 1)."""

    path: Path
    content: bytes
    start_byte: int
    first_line: int

    @property
    def num_bytes(self) -> int:
        """Size of the content."""
        return len(self.content)


class RecordBlock(NamedTuple):
    """Texts (str, or bytes in UTF-8) of the records `first`, `first` + 1, … of `source`; None for one without text.

    `unit` is what messages call a record, such as "row".
    """

    source: str
    unit: str
    first: int
    texts: list[bytes | str | None]
    num_bytes: int


Block = TextBlock | JsonLinesBlock | RecordBlock


class Position(NamedTuple):
    """How far the sources have been read: `block` blocks of source number `source`, `done_bytes` bytes in total."""

    source: int = 0
    block: int = 0
    done_bytes: int = 0


class Source(Protocol):
    """Anything that can be read as blocks: a file or a dataset."""

    @property
    def size_bytes(self) -> int:
        """Size of the source, 0 if it is unknown."""

    def read_blocks(self, options: ReadOptions) -> Iterator[tuple[Block, int]]:
        """Yield the blocks in order, each with the number of bytes of the source up to the block's end.

        Raises:
            DataError: If the source cannot be read; names the place.
        """


class FileSource:
    """An input file as a source."""

    def __init__(self, file: InputFile) -> None:
        self._file = file

    @property
    def size_bytes(self) -> int:
        """Size of the file as stored, compressed or not."""
        return self._file.size_bytes

    def read_blocks(self, options: ReadOptions) -> Iterator[tuple[Block, int]]:
        """See `Source`."""
        return _READER_OF_FORMAT[self._file.format](self._file, options)


class Task(NamedTuple):
    """Blocks that one worker reads together, and the position after them."""

    blocks: list[Block]
    end: Position

    @property
    def num_bytes(self) -> int:
        """Total size of the blocks."""
        return sum(block.num_bytes for block in self.blocks)


def read_tasks(sources: Iterable[Source], options: ReadOptions, start: Position | None = None) -> Iterator[Task]:
    """Yield all blocks of the sources from `start` on, in order, in tasks of about a megabyte."""
    blocks: list[Block] = []
    num_bytes = 0
    end = Position()
    for block, end in _blocks_from(sources, options, start or Position()):
        blocks.append(block)
        num_bytes += block.num_bytes
        if num_bytes >= BLOCK_BYTES or len(blocks) >= BLOCK_BYTES >> 8:
            yield Task(blocks, end)
            blocks, num_bytes = [], 0
    if blocks:
        yield Task(blocks, end)


def _blocks_from(sources: Iterable[Source], options: ReadOptions, start: Position) -> Iterator[tuple[Block, Position]]:
    earlier_bytes = 0
    for number, source in enumerate(sources):
        if number >= start.source:
            num_skipped = start.block if number == start.source else 0
            found = enumerate(source.read_blocks(options), 1)
            for count, (block, done_bytes) in islice(found, num_skipped, None):
                yield block, Position(number, count, earlier_bytes + done_bytes)
        earlier_bytes += source.size_bytes


def _chunks(file: InputFile, options: ReadOptions) -> Iterator[Chunk]:
    return to_utf8(read_chunks(file), options.encoding, file.path, options.on_error)


def _read_text(file: InputFile, options: ReadOptions) -> Iterator[tuple[Block, int]]:
    for content, start_byte, stored_bytes in _cut(_chunks(file, options), _CUTS[options.document_per]):
        yield TextBlock(file.path, content, start_byte), stored_bytes


def _read_jsonl(file: InputFile, options: ReadOptions) -> Iterator[tuple[Block, int]]:
    return _json_lines_blocks(file, _chunks(file, options))


def _json_lines_blocks(file: InputFile, chunks: Iterator[Chunk]) -> Iterator[tuple[Block, int]]:
    first_line = 1
    for content, start_byte, stored_bytes in _cut(chunks, _after_newline):
        yield JsonLinesBlock(file.path, content, start_byte, first_line), stored_bytes
        first_line += content.count(b"\n")


def _read_json(file: InputFile, options: ReadOptions) -> Iterator[tuple[Block, int]]:
    """Read a `.json` file: JSON Lines under another name, a list of records, or a sequence of records."""
    chunks = _chunks(file, options)
    beginning: list[Chunk] = []
    content = b""
    for chunk in chunks:
        beginning.append(chunk)
        content += chunk.content
        if b"\n" in content.lstrip() or len(content) > 8 * BLOCK_BYTES:
            break
    all_chunks = _chain(beginning, chunks)
    if _begins_with_an_object_in_a_line(content):
        return _json_lines_blocks(file, all_chunks)
    return record_blocks(str(file.path), "record", _json_texts(file.path, all_chunks, options))


def _chain(beginning: list[Chunk], rest: Iterator[Chunk]) -> Iterator[Chunk]:
    yield from beginning
    yield from rest


def _begins_with_an_object_in_a_line(content: bytes) -> bool:
    first_line = content.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")[0]
    try:
        return isinstance(json.loads(first_line), dict)
    except (ValueError, RecursionError):
        return False


def _json_texts(path: Path, chunks: Iterator[Chunk], options: ReadOptions) -> Iterator[tuple[list[_Text], int]]:
    """Yield the text of each record and the bytes of the file read so far; only one record is in memory at a time."""
    for number, (value, stored_bytes) in enumerate(read_json_values(path, chunks, options.on_error)):
        text = value if isinstance(value, str) else value.get(options.text_key) if isinstance(value, dict) else None
        if not isinstance(text, str) and options.on_error != "skip":
            raise DataError(f"{path}: record {number:,}: {describe_missing_text(value, options.text_key)}")
        yield [text if isinstance(text, str) else None], stored_bytes


def describe_missing_text(value: object, text_key: str) -> str:
    """Describe what is wrong with a JSON value that should be an object with a text."""
    if not isinstance(value, dict):
        return f"expected a JSON object, found {type(value).__name__}"
    if text_key in value:
        return f"{text_key!r} (--text-key) is {type(value[text_key]).__name__}, expected a string"
    keys = ", ".join(sorted(value)) or "none"
    return f"no text under {text_key!r} (--text-key); keys here: {keys}"


def _read_parquet(file: InputFile, options: ReadOptions) -> Iterator[tuple[Block, int]]:
    from data.tables import parquet_columns

    with open_seekable(file) as stream:
        texts = parquet_columns(stream, str(file.path), options.text_key, file.size_bytes, _ROWS_PER_BATCH)
        yield from record_blocks(str(file.path), "row", texts)


def _read_arrow(file: InputFile, options: ReadOptions) -> Iterator[tuple[Block, int]]:
    from data.tables import arrow_columns

    with open_seekable(file) as stream:
        texts = arrow_columns(stream, str(file.path), options.text_key, file.size_bytes, _ROWS_PER_BATCH)
        yield from record_blocks(str(file.path), "row", texts)


def record_blocks(source: str, unit: str, texts: Iterable[tuple[list[_Text], int]]) -> Iterator[tuple[Block, int]]:
    """Collect records of `source` into blocks.

    Args:
        source: What messages call the source.
        unit: What messages call a record.
        texts: Batches of texts, each with the number of bytes of the source read so far.

    Returns:
        Blocks, each with the number of bytes of the source up to its end.
    """
    collected: list[_Text] = []
    first = num_bytes = done_bytes = 0
    for some, done_bytes in texts:
        collected += some
        num_bytes += sum(len(text) for text in some if text is not None)
        if num_bytes >= BLOCK_BYTES or len(collected) >= BLOCK_BYTES >> 4:
            yield RecordBlock(source, unit, first, collected, num_bytes), done_bytes
            first += len(collected)
            collected, num_bytes = [], 0
    if collected:
        yield RecordBlock(source, unit, first, collected, num_bytes), done_bytes


_Cut = Callable[[bytearray, int], int]


def _cut(chunks: Iterator[Chunk], find_cut: _Cut) -> Iterator[tuple[bytes, int, int]]:
    """Split chunks into blocks where `find_cut(buffer, start)` allows it: (content, first byte, bytes as stored)."""
    buffer = bytearray()
    start_byte = stored_bytes = searched = num_blocks = 0
    is_first = True
    for content, stored_bytes in chunks:
        buffer += content
        if is_first and len(buffer) >= len(codecs.BOM_UTF8):
            is_first = False
            if buffer.startswith(codecs.BOM_UTF8):
                del buffer[: len(codecs.BOM_UTF8)]
                start_byte = len(codecs.BOM_UTF8)
        if len(buffer) < BLOCK_BYTES:
            continue
        cut = find_cut(buffer, searched)
        searched = len(buffer) if cut == 0 else 0
        if cut:
            yield bytes(memoryview(buffer)[:cut]), start_byte, stored_bytes
            del buffer[:cut]
            start_byte += cut
            num_blocks += 1
    if buffer or num_blocks == 0:
        yield bytes(buffer), start_byte, stored_bytes


def _after_newline(buffer: bytearray, start: int) -> int:
    return buffer.rfind(b"\n", start) + 1


def _after_line(buffer: bytearray, start: int) -> int:
    """Position after the last "\\n", else after the last "\\r" that cannot be half of "\\r\\n"; 0 if there is none."""
    return _after_newline(buffer, start) or buffer.rfind(b"\r", max(start - 1, 0), len(buffer) - 1) + 1


def _after_blank_line(buffer: bytearray, start: int) -> int:
    start = max(start - _MAX_BLANK_LINE_BYTES, 0)
    found = [(buffer.rfind(ends, start), len(ends)) for ends in (b"\n\n", b"\n\r\n", b"\r\r")]
    if max(found)[0] >= 0:
        return max(position + length for position, length in found if position >= 0)
    return max((match.end() for match in _BLANK_LINE.finditer(buffer, start)), default=0)


def _nowhere(buffer: bytearray, start: int) -> int:
    return 0


_CUTS: dict[str, _Cut] = {"file": _nowhere, "line": _after_line, "block": _after_blank_line}
_READER_OF_FORMAT: dict[str, Callable[[InputFile, ReadOptions], Iterator[tuple[Block, int]]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "json": _read_json,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
