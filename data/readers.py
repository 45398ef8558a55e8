"""Reads documents from blocks, and handles bytes that cannot be decoded."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator

from data.blocks import Block, JsonLinesBlock, ReadOptions, RecordBlock, TextBlock, describe_missing_text
from data.errors import DataError
from data.streams import describe_bad_byte

_SURROGATES = re.compile("[\ud800-\udfff]")


def read_documents(blocks: list[Block], options: ReadOptions, counts: Counter[str]) -> Iterator[str]:
    """Yield the documents of blocks in order; all of them can be encoded as UTF-8.

    Args:
        blocks: Blocks of any type.
        options: How to split and decode them.
        counts: Receives the number of "documents" found, of those "skipped" because of an error, and of characters
            "replaced".

    Raises:
        DataError: If there is an error that `options.on_error` does not cover; names the file and the byte, line or
            row.
    """
    reader = _Reader(options, counts)
    for block in blocks:
        for text in reader.read(block):
            counts["documents"] += 1
            if text is not None:
                yield text


class _Reader:
    """Reads blocks according to the options; a skipped document is None."""

    def __init__(self, options: ReadOptions, counts: Counter[str]) -> None:
        self._options = options
        self._counts = counts

    def read(self, block: Block) -> Iterator[str | None]:
        if isinstance(block, JsonLinesBlock):
            return self._read_json_lines(block)
        if isinstance(block, RecordBlock):
            return self._read_records(block)
        return self._read_text(block)

    def _read_text(self, block: TextBlock) -> Iterator[str | None]:
        for start, content in _UNITS[self._options.document_per](block.content):
            yield self._decode(content, block.start_byte + start, str(block.path))

    def _read_json_lines(self, block: JsonLinesBlock) -> Iterator[str | None]:
        offset = block.start_byte
        for number, line in enumerate(block.content.split(b"\n"), block.first_line):
            if line.strip():
                yield self._read_json_line(line, offset, f"{block.path}:{number}")
            offset += len(line) + 1

    def _read_json_line(self, line: bytes, offset: int, place: str) -> str | None:
        content = self._decode(line, offset, place)
        if content is None:
            return None
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            self._skip_record(f"{place}: not valid JSON: {error} (byte {offset:,})")
            return None
        text = record.get(self._options.text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            self._skip_record(f"{place}: {describe_missing_text(record, self._options.text_key)}")
            return None
        return self._repair(text, place)

    def _read_records(self, block: RecordBlock) -> Iterator[str | None]:
        for number, text in enumerate(block.texts, block.first):
            place = f"{block.source}: {block.unit} {number:,}"
            if isinstance(text, bytes):
                yield self._decode(text, 0, place)
            elif text is not None:
                yield self._repair(text, place)
            else:
                self._skip_record(f"{place}: no text under {self._options.text_key!r} (--text-key)")
                yield None

    def _decode(self, content: bytes, offset: int, place: str) -> str | None:
        """Decode UTF-8 whose first byte is byte `offset` of `place`; return None if the document is skipped."""
        try:
            return self._unify(content.decode())
        except UnicodeDecodeError as error:
            found = describe_bad_byte(offset + error.start, content[error.start], "utf-8", content)
            self._handle_bad_text(f"{place}: {found}")
        if self._options.on_error == "skip":
            return None
        text = content.decode(errors="replace")
        self._counts["replaced"] += text.count("\ufffd") - content.count("\ufffd".encode())
        return self._unify(text)

    def _repair(self, text: str, place: str) -> str | None:
        """Replace lone surrogates, such as "\\ud800" in JSON; return None if the document is skipped."""
        match = _SURROGATES.search(text) if not text.isascii() else None
        if match is not None:
            self._handle_bad_text(f"{place}: character {match.start():,} of the text is a lone surrogate (--on-error)")
            if self._options.on_error == "skip":
                return None
            text, num_replaced = _SURROGATES.subn("\ufffd", text)
            self._counts["replaced"] += num_replaced
        return self._unify(text)

    def _skip_record(self, message: str) -> None:
        """Skip a record without text, which cannot be repaired, or raise DataError."""
        if self._options.on_error != "skip":
            raise DataError(f"{message}; use --on-error skip to skip it")
        self._counts["skipped"] += 1

    def _handle_bad_text(self, message: str) -> None:
        """Raise DataError for text that cannot be decoded, or count the document if it is skipped."""
        if self._options.on_error == "stop":
            raise DataError(message)
        self._counts["skipped"] += self._options.on_error == "skip"

    def _unify(self, text: str) -> str:
        if self._options.newlines == "keep" or "\r" not in text:
            return text
        return text.replace("\r\n", "\n").replace("\r", "\n")


def _whole(content: bytes) -> Iterator[tuple[int, bytes]]:
    yield 0, content


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield start and content of each line; lines end with "\\n", "\\r\\n" or "\\r"."""
    start = 0
    for line in content.splitlines(keepends=True):
        yield start, line.rstrip(b"\r\n")
        start += len(line)


def _line_groups(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield start and content of each group of lines between blank lines."""
    group_start = start = 0
    group: list[bytes] = []
    for line in content.splitlines(keepends=True):
        is_blank = not line.strip() or not line.decode(errors="replace").strip()
        if is_blank and group:
            yield group_start, _join_lines(group)
            group = []
        elif not is_blank:
            group_start = group_start if group else start
            group.append(line)
        start += len(line)
    if group:
        yield group_start, _join_lines(group)


def _join_lines(lines: list[bytes]) -> bytes:
    """Join lines, without the line end of the last one."""
    return b"".join([*lines[:-1], lines[-1].rstrip(b"\r\n")])


_UNITS: dict[str, Callable[[bytes], Iterator[tuple[int, bytes]]]] = {
    "file": _whole,
    "line": _lines,
    "block": _line_groups,
}
