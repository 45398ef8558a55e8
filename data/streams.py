"""Reads the bytes of an input file: decompresses them, and converts other encodings to UTF-8."""

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
_ZSTD_READ_BYTES = 32 << 10  # may decompress to a hundred times as much
_ZSTD_WINDOW_BYTES = 1 << 31  # as written by `zstd --long=31`
_MARK_ERRORS = "data.streams.mark"
_MARK = "\udcff"  # `surrogateescape` encodes it as the byte 0xFF, which never occurs in UTF-8


class Chunk(NamedTuple):
    """Some decompressed bytes of a file, and how many bytes of the stored file have been read so far."""

    content: bytes
    stored_bytes: int


def read_chunks(file: InputFile) -> Iterator[Chunk]:
    """Yield the decompressed content of a file, in order.

    Raises:
        DataError: If a compressed file is damaged or truncated.
        OSError: If the file cannot be read.
    """
    with file.path.open("rb", buffering=0) as raw:
        try:
            yield from _CHUNK_READERS[file.compression](raw)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{file.path}: damaged {file.compression} file: {error}") from None


@contextmanager
def open_seekable(file: InputFile) -> Iterator[BinaryIO]:
    """Open a file for random access; a compressed one is first decompressed to a temporary file (in TMPDIR)."""
    if file.compression is None:
        with file.path.open("rb") as plain:
            yield plain
        return
    with tempfile.TemporaryFile() as decompressed:
        for chunk in read_chunks(file):
            decompressed.write(chunk.content)
        decompressed.seek(0)
        yield decompressed


def check_encoding(name: str) -> str:
    """Return the usual name of an encoding; with or without a byte order mark, that of UTF-8 is "utf-8".

    Raises:
        DataError: If Python has no such text encoding.
    """
    try:
        codec = codecs.lookup(name)
        "".encode(name)  # excludes bytes-to-bytes codecs
    except (LookupError, ValueError):
        raise DataError(
            f"--encoding {name}: unknown; expected a name such as utf-8, latin-1, utf-16, gb18030"
        ) from None
    return "utf-8" if codec.name == "utf-8-sig" else codec.name


def to_utf8(chunks: Iterator[Chunk], encoding: str, path: Path, on_error: str) -> Iterator[Chunk]:
    """Convert chunks from `encoding` to UTF-8, with the byte 0xFF in place of bytes that cannot be decoded.

    Raises:
        DataError: If there is such a byte and `on_error` is "stop".
    """
    if encoding == "utf-8":
        yield from chunks
        return
    for text, stored_bytes in decode_chunks(chunks, encoding, path, on_error):
        yield Chunk(text.encode("utf-8", "surrogateescape"), stored_bytes)


def decode_chunks(chunks: Iterator[Chunk], encoding: str, path: Path, on_error: str) -> Iterator[tuple[str, int]]:
    """Decode chunks, with a lone surrogate in place of bytes that cannot be decoded.

    Returns:
        Texts, each with the number of bytes of the stored file read so far.

    Raises:
        DataError: If there is such a byte and `on_error` is "stop".
    """
    codecs.register_error(_MARK_ERRORS, lambda error: (_MARK, error.end))  # type: ignore[attr-defined]
    decoder = codecs.getincrementaldecoder(encoding)("strict" if on_error == "stop" else _MARK_ERRORS)
    read_bytes = stored_bytes = 0
    for content, stored_bytes in chunks:
        read_bytes += len(content)
        yield _decode(decoder, content, False, read_bytes, encoding, path), stored_bytes
    yield _decode(decoder, b"", True, read_bytes, encoding, path), stored_bytes


def describe_bad_byte(offset: int, byte: int, encoding: str, beginning: bytes) -> str:
    """Describe a byte that cannot be decoded, and the options that help; `beginning` starts the file or record."""
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    hint = ", perhaps UTF-16 (--encoding utf-16)" if offset == 0 and beginning.startswith(marks) else ""
    return f"byte {offset:,} is 0x{byte:02X}: not {encoding.upper()}{hint} (--encoding, --on-error)"


def _decode(
    decoder: codecs.IncrementalDecoder, content: bytes, final: bool, read_bytes: int, encoding: str, path: Path
) -> str:
    try:
        return decoder.decode(content, final)
    except UnicodeDecodeError as error:
        # The beginning of `error.object` may come from earlier chunks.
        offset = read_bytes - len(error.object) + error.start
        found = describe_bad_byte(offset, error.object[error.start], encoding, error.object)
        raise DataError(f"{path}: {found}") from None
    except UnicodeError as error:
        if encoding in ("utf-16", "utf-32"):
            message = f"no byte order mark; use --encoding {encoding}-le or {encoding}-be"
            raise DataError(f"{path}: {message}") from None
        raise DataError(f"{path}: not {encoding.upper()} (--encoding): {error}") from None


def _read_plain(raw: BinaryIO) -> Iterator[Chunk]:
    stored_bytes = 0
    while content := raw.read(CHUNK_BYTES):
        stored_bytes += len(content)
        yield Chunk(content, stored_bytes)


def _read_gzip(raw: BinaryIO) -> Iterator[Chunk]:
    with gzip.GzipFile(fileobj=raw) as decompressed:
        while content := decompressed.read(CHUNK_BYTES):
            yield Chunk(content, raw.tell())


def _read_zstd(raw: BinaryIO) -> Iterator[Chunk]:
    import zstandard

    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = None
    while stored := raw.read(_ZSTD_READ_BYTES):
        while stored:
            frame = frame or context.decompressobj()
            try:
                content = frame.decompress(stored)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            if content:
                yield Chunk(content, raw.tell())
            stored = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame is incomplete")


_CHUNK_READERS = {None: _read_plain, "gzip": _read_gzip, "zstd": _read_zstd}
