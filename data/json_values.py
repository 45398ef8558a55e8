"""Reads the values of a JSON file (a list of values, or a sequence of them) with only one in memory at a time."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.streams import Chunk, decode_chunks

_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN_VALUES = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")
_MAX_LITERAL_CHARS = 16  # an error this close to the end of the text read so far may be due to that end
_DECODER = json.JSONDecoder()


def read_json_values(path: Path, chunks: Iterator[Chunk], on_error: str) -> Iterator[tuple[Any, int]]:
    """Yield each value, and how many bytes of the stored file have been read so far.

    A byte that is not UTF-8 is an error if `on_error` is "stop", and becomes a lone surrogate in the value otherwise.

    Raises:
        DataError: If the file is not JSON or not UTF-8; names the character or byte.
    """
    window = _Window(path, decode_chunks(chunks, "utf-8", path, on_error))
    window.skip(_SPACE)
    in_list = window.peek() == "["
    if in_list:
        window.position += 1
    while True:
        window.skip(_BETWEEN_VALUES)
        following = window.peek()
        if in_list and following == "]":
            window.position += 1
            window.skip(_SPACE)
            if window.peek():
                raise window.error("unexpected text after the list", window.position)
            return
        if not following:
            if in_list:
                raise window.error("the list is not closed", window.position)
            return
        yield window.take_value(), window.stored_bytes


class _Window:
    """The part of the file's text that is in memory, and a position in it.

    Attributes:
        position: Index of the next character in that part.
        stored_bytes: Bytes of the stored file read so far.
    """

    def __init__(self, path: Path, texts: Iterator[tuple[str, int]]) -> None:
        self.position = 0
        self.stored_bytes = 0
        self._path = path
        self._texts = _without_byte_order_mark(texts)
        self._text = ""
        self._chars_before = 0
        self._at_end = False

    def skip(self, pattern: re.Pattern[str]) -> None:
        """Move past the text that matches at the position."""
        while True:
            match = pattern.match(self._text, self.position)
            assert match is not None
            if match.end() < len(self._text) or self._at_end:
                self.position = match.end()
                return
            self._read_beyond(len(self._text) - self.position)

    def peek(self) -> str:
        """Return the next character, or an empty string at the end of the file."""
        self._read_beyond(0)
        return self._text[self.position : self.position + 1]

    def take_value(self) -> Any:
        """Return the value that starts at the position, and move past it."""
        while True:
            try:
                value, stop = _DECODER.raw_decode(self._text, self.position)
            except json.JSONDecodeError as error:
                is_cut_short = error.pos > len(self._text) - _MAX_LITERAL_CHARS or error.msg.startswith("Unterminated")
                if self._at_end or not is_cut_short:
                    raise self.error(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise self.error(str(error), self.position) from None
            else:
                if stop < len(self._text) or self._at_end:  # otherwise a number may continue
                    self.position = stop
                    return value
            self._read_beyond(2 * (len(self._text) - self.position))

    def error(self, message: str, position: int) -> DataError:
        """Return an error that names a position in the part as one in the file."""
        return DataError(f"{self._path}: not valid JSON: {message}, at character {self._chars_before + position:,}")

    def _read_beyond(self, num_chars: int) -> None:
        """Read until more than `num_chars` characters follow the position, or the file ends."""
        if len(self._text) - self.position > num_chars:
            return
        parts = [self._text[self.position :]]
        num_available = len(parts[0])
        while num_available <= num_chars and not self._at_end:
            text, self.stored_bytes = next(self._texts, ("", self.stored_bytes))
            self._at_end = not text
            parts.append(text)
            num_available += len(text)
        self._chars_before += self.position
        self._text, self.position = "".join(parts), 0


def _without_byte_order_mark(texts: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the texts that are not empty, without a byte order mark at the beginning."""
    is_first = True
    for part, stored_bytes in texts:
        text = part.removeprefix("\ufeff") if is_first else part
        is_first &= not part
        if text:
            yield text, stored_bytes
