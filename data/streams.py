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
    except LookupError:
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
    codecs.register_error(_MARK_ERRORS, lambda error: (_MARK, error.end))  # type: ignore[attr-defined]
    decoder = codecs.getincrementaldecoder(encoding)("strict" if on_error == "stop" else _MARK_ERRORS)
    read_bytes = stored_bytes = 0
    for content, stored_bytes in chunks:
        read_bytes += len(content)
        yield Chunk(_decode(decoder, content, False, read_bytes, encoding, path), stored_bytes)
    yield Chunk(_decode(decoder, b"", True, read_bytes, encoding, path), stored_bytes)


def _decode(
    decoder: codecs.IncrementalDecoder, content: bytes, final: bool, read_bytes: int, encoding: str, path: Path
) -> bytes:
    try:
        return decoder.decode(content, final).encode("utf-8", "surrogateescape")
    except UnicodeDecodeError as error:
        # The decoder had kept the beginning of `error.object` from earlier chunks.
        offset = read_bytes - len(error.object) + error.start
        found = f"0x{error.object[error.start]:02X}"
        raise DataError(f"{path}: byte {offset:,} is {found}: not {encoding} (--encoding, --on-error)") from None
    except UnicodeError:  # of UTF-16 and UTF-32
        raise DataError(f"{path}: no byte order mark; --encoding {encoding}-le or {encoding}-be needs none") from None


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
