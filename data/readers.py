"""Input files to documents.

A reader is a function from a path and `ReadOptions` to documents. To read another format, write one and name
its suffixes in `_READER_OF_SUFFIX`.
"""

import codecs
import glob
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data.errors import DataError

DOCUMENT_UNITS = ("file", "line", "paragraph")


class Document(NamedTuple):
    """One document: its text with "\\n" line ends, its place for messages, the byte it ends at."""

    text: str
    place: str
    end_bytes: int


@dataclass(frozen=True)
class ReadOptions:
    """How readers cut files into documents.

    Attributes:
        document_per: of a text file, the whole "file", each "line" or each "paragraph" (up to a blank line).
        text_key: of a JSONL line: the key that holds the text.
    """

    document_per: str = "file"
    text_key: str = "text"


Reader = Callable[[Path, ReadOptions], Iterator[Document]]


def read_documents(path: Path, options: ReadOptions) -> Iterator[Document]:
    """Documents of a file, by the reader for its suffix; text if the suffix is unknown.

    Raises:
        DataError: names the file and the byte or line that cannot be read.
    """
    return _READER_OF_SUFFIX.get(path.suffix.lower(), read_text)(path, options)


def find_input_files(inputs: Iterable[str]) -> list[Path]:
    """Files that paths, folders and globs stand for, each once, in the order given and by name within each.

    A folder stands for all files below it with the suffix of a reader, hidden ones left out.

    Raises:
        DataError: one of them stands for no file.
    """
    files: dict[Path, Path] = {}
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            found = [child for child in sorted(path.rglob("*")) if _is_input(child.relative_to(path), child)]
            if not found:
                raise DataError(f"--input {given}: no {', '.join(_READER_OF_SUFFIX)} file in this folder")
        elif path.is_file():
            found = [path]
        else:
            found = [Path(name) for name in sorted(glob.glob(given, recursive=True)) if Path(name).is_file()]
            if not found:
                raise DataError(f"--input {given}: no such file or folder, and no file matches it as a pattern")
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def read_text(path: Path, options: ReadOptions) -> Iterator[Document]:
    """Documents of a UTF-8 text file, with or without byte order mark and with any line ends."""
    lines = _decoded_lines(path)
    if options.document_per == "file":
        yield Document("".join(text for text, _ in lines), str(path), path.stat().st_size)
    elif options.document_per == "line":
        for text, end_bytes in lines:
            yield Document(text.removesuffix("\n"), str(path), end_bytes)
    else:
        paragraph: list[str] = []
        end_bytes = 0
        for text, end_bytes in lines:
            if text.strip():
                paragraph.append(text)
            elif paragraph:
                yield Document("".join(paragraph).removesuffix("\n"), str(path), end_bytes)
                paragraph.clear()
        if paragraph:
            yield Document("".join(paragraph).removesuffix("\n"), str(path), end_bytes)


def read_jsonl(path: Path, options: ReadOptions) -> Iterator[Document]:
    """Documents of a file with one JSON object a line; blank lines are passed over."""
    with path.open("rb") as file:
        end_bytes = 0
        for number, line in enumerate(file, 1):
            end_bytes += len(line)
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                record = json.loads(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: not UTF-8: {error.reason}") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place}: not valid JSON: {error}") from None
            if not isinstance(record, dict):
                raise DataError(f"{place}: a JSON object expected, {type(record).__name__} found")
            text = record.get(options.text_key)
            if not isinstance(text, str):
                keys = ", ".join(sorted(record)) or "none"
                raise DataError(f"{place}: no text under {options.text_key!r} (--text-key); keys here: {keys}")
            yield Document(_unify_line_ends(text), place, end_bytes)


_READER_OF_SUFFIX: dict[str, Reader] = {
    ".txt": read_text,
    ".text": read_text,
    ".md": read_text,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
}


def _is_input(relative: Path, path: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and path.suffix.lower() in _READER_OF_SUFFIX and path.is_file()


def _decoded_lines(path: Path) -> Iterator[tuple[str, int]]:
    """(line with its "\\n", byte it ends at) for each line of a file."""
    with path.open("rb") as file:
        end_bytes = 0
        for line in file:
            if end_bytes == 0 and line.startswith(codecs.BOM_UTF8):
                end_bytes = len(codecs.BOM_UTF8)
                line = line[end_bytes:]
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}: byte {end_bytes + error.start:,} is 0x{line[error.start]:02X}: not UTF-8"
                ) from None
            end_bytes += len(line)
            for part in io.StringIO(_unify_line_ends(text)):  # more than one where "\r" ends lines
                yield part, end_bytes


def _unify_line_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
