"""The values in a JSON file of any size: of the list that it holds, or one after the other; one at a time in memory."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.streams import Chunk, decode_chunks

_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN_VALUES = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")
_LONGEST_LITERAL = 16  # an error so near to the end of what has been read may be due to that end
_DECODER = json.JSONDecoder()


def read_json_values(path: Path, chunks: Iterator[Chunk], on_error: str) -> Iterator[tuple[Any, int]]:
    """Each value, and the bytes of the file as stored that have been read by then.

    A byte that is not UTF-8 is an error if `on_error` is "stop", else half of a surrogate pair in the value.

    Raises:
        DataError: the file is not JSON or not UTF-8; names the character or byte.
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
                raise window.error("more text after the list", window.position)
            return
        if not following:
            if in_list:
                raise window.error("the list has no end", window.position)
            return
        yield window.take_value(), window.stored_bytes


class _Window:
    """A part of the file's text, and a position in it.

    Attributes:
        position: in the part.
        stored_bytes: read so far.
    """

    def __init__(self, path: Path, texts: Iterator[tuple[str, int]]) -> None:
        self.position = 0
        self.stored_bytes = 0
        self._path = path
        self._pieces = _without_byte_order_mark(texts)
        self._text = ""
        self._chars_before = 0
        self._at_end = False

    def skip(self, pattern: re.Pattern[str]) -> None:
        """Step over what matches here."""
        while True:
            match = pattern.match(self._text, self.position)
            assert match is not None
            if match.end() < len(self._text) or self._at_end:
                self.position = match.end()
                return
            self._read_beyond(len(self._text) - self.position)

    def peek(self) -> str:
        """The next character, none at the end of the file."""
        self._read_beyond(0)
        return self._text[self.position : self.position + 1]

    def take_value(self) -> Any:
        """The value that starts here."""
        while True:
            try:
                value, stop = _DECODER.raw_decode(self._text, self.position)
            except json.JSONDecodeError as error:
                is_cut_short = error.pos > len(self._text) - _LONGEST_LITERAL or error.msg.startswith("Unterminated")
                if self._at_end or not is_cut_short:
                    raise self.error(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise self.error(str(error), self.position) from None
            else:
                if stop < len(self._text) or self._at_end:  # else a number may go on
                    self.position = stop
                    return value
            self._read_beyond(2 * (len(self._text) - self.position))

    def error(self, message: str, position: int) -> DataError:
        """What is wrong at a position of the part."""
        return DataError(f"{self._path}: not valid JSON: {message}, at character {self._chars_before + position:,}")

    def _read_beyond(self, num_chars: int) -> None:
        """Read until there are more characters than that from the position on, or the file ends."""
        if len(self._text) - self.position > num_chars:
            return
        parts = [self._text[self.position :]]
        num_there = len(parts[0])
        while num_there <= num_chars and not self._at_end:
            piece, self.stored_bytes = next(self._pieces, ("", self.stored_bytes))
            self._at_end = not piece
            parts.append(piece)
            num_there += len(piece)
        self._chars_before += self.position
        self._text, self.position = "".join(parts), 0


def _without_byte_order_mark(texts: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Pieces of text, none of them empty."""
    is_first = True
    for piece, stored_bytes in texts:
        text = piece.removeprefix("\ufeff") if is_first else piece
        is_first &= not piece
        if text:
            yield text, stored_bytes
