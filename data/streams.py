"""The bytes of an input file: decompressed, and turned into UTF-8 if they are in another encoding."""

import codecs
import gzip
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data.errors import DataError
from data.inputs import InputFile

CHUNK_BYTES = 1 << 20
_ZSTD_READ_BYTES = 32 << 10  # one such piece may become a hundred times as much
_ZSTD_WINDOW_BYTES = 1 << 31  # files of `zstd --long=31` exist
_MARK_ERRORS = "data.streams.mark"
_MARK = "\udcff"  # as `surrogateescape` writes the byte 0xFF, which UTF-8 never has


class Chunk(NamedTuple):
    """Some bytes of a file, and how many bytes of the file as stored have been read so far."""

    content: bytes
    stored_bytes: int


def read_chunks(file: InputFile) -> Iterator[Chunk]:
    """The decompressed content of a file, in order.

    Raises:
        DataError: a compressed file is damaged or cut short.
        OSError: it cannot be read.
    """
    with file.path.open("rb", buffering=0) as raw:
        try:
            yield from _CHUNK_READERS[file.compression](raw)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{file.path}: damaged {file.compression} file: {error}") from None


@contextmanager
def open_seekable(file: InputFile) -> Iterator[BinaryIO]:
    """A file for reading anywhere in it; a compressed one is first unpacked into a temporary file (TMPDIR)."""
    if file.compression is None:
        with file.path.open("rb") as plain:
            yield plain
        return
    with tempfile.TemporaryFile() as unpacked:
        for chunk in read_chunks(file):
            unpacked.write(chunk.content)
        unpacked.seek(0)
        yield unpacked


def check_encoding(name: str) -> str:
    """The usual name of an encoding; that of UTF-8, with or without byte order mark, is "utf-8".

    Raises:
        DataError: Python knows no such encoding of text.
    """
    try:
        codec = codecs.lookup(name)
        "".encode(name)  # not one of those from bytes to bytes
    except (LookupError, ValueError):
        raise DataError(
            f"--encoding {name}: unknown; expected a name such as utf-8, latin-1, utf-16, gb18030"
        ) from None
    return "utf-8" if codec.name == "utf-8-sig" else codec.name


def to_utf8(chunks: Iterator[Chunk], encoding: str, path: Path, on_error: str) -> Iterator[Chunk]:
    """Chunks in `encoding` as chunks in UTF-8; where a byte cannot be decoded, the UTF-8 has the byte 0xFF.

    Raises:
        DataError: there is such a byte and `on_error` is "stop".
    """
    if encoding == "utf-8":
        yield from chunks
        return
    for text, stored_bytes in decode_chunks(chunks, encoding, path, on_error):
        yield Chunk(text.encode("utf-8", "surrogateescape"), stored_bytes)


def decode_chunks(chunks: Iterator[Chunk], encoding: str, path: Path, on_error: str) -> Iterator[tuple[str, int]]:
    """The text of chunks, with the bytes stored; where a byte cannot be decoded, it has half of a surrogate pair.

    Raises:
        DataError: there is such a byte and `on_error` is "stop".
    """
    codecs.register_error(_MARK_ERRORS, lambda error: (_MARK, error.end))  # type: ignore[attr-defined]
    decoder = codecs.getincrementaldecoder(encoding)("strict" if on_error == "stop" else _MARK_ERRORS)
    read_bytes = stored_bytes = 0
    for content, stored_bytes in chunks:
        read_bytes += len(content)
        yield _decode(decoder, content, False, read_bytes, encoding, path), stored_bytes
    yield _decode(decoder, b"", True, read_bytes, encoding, path), stored_bytes


def describe_bad_byte(offset: int, byte: int, encoding: str, beginning: bytes) -> str:
    """What is wrong with a byte of a file or record that begins so, and which options answer it."""
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    hint = ", but perhaps UTF-16 (--encoding utf-16)" if offset == 0 and beginning.startswith(marks) else ""
    return f"byte {offset:,} is 0x{byte:02X}: not {encoding.upper()}{hint} (--encoding, --on-error)"


def _decode(
    decoder: codecs.IncrementalDecoder, content: bytes, final: bool, read_bytes: int, encoding: str, path: Path
) -> str:
    try:
        return decoder.decode(content, final)
    except UnicodeDecodeError as error:
        # The decoder had kept the beginning of `error.object` from earlier chunks.
        offset = read_bytes - len(error.object) + error.start
        found = describe_bad_byte(offset, error.object[error.start], encoding, error.object)
        raise DataError(f"{path}: {found}") from None
    except UnicodeError as error:
        if encoding in ("utf-16", "utf-32"):
            message = f"no byte order mark; --encoding {encoding}-le or {encoding}-be needs none"
            raise DataError(f"{path}: {message}") from None
        raise DataError(f"{path}: not {encoding.upper()} (--encoding): {error}") from None


def _read_plain(raw: BinaryIO) -> Iterator[Chunk]:
    stored_bytes = 0
    while content := raw.read(CHUNK_BYTES):
        stored_bytes += len(content)
        yield Chunk(content, stored_bytes)


def _read_gzip(raw: BinaryIO) -> Iterator[Chunk]:
    with gzip.GzipFile(fileobj=raw) as unpacked:
        while content := unpacked.read(CHUNK_BYTES):
            yield Chunk(content, raw.tell())


def _read_zstd(raw: BinaryIO) -> Iterator[Chunk]:
    import zstandard

    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = None
    while piece := raw.read(_ZSTD_READ_BYTES):
        while piece:
            frame = frame or context.decompressobj()
            try:
                content = frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            if content:
                yield Chunk(content, raw.tell())
            piece = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")


_CHUNK_READERS = {None: _read_plain, "gzip": _read_gzip, "zstd": _read_zstd}
