"""Tests of reading compressed files, intact and damaged."""

import gzip
import random
from pathlib import Path

import pytest
import zstandard

from data.errors import DataError
from data.inputs import InputFile
from data.streams import open_seekable, read_chunks

CONTENT = random.Random(0).randbytes(300_000) + b"x" * 3_000_000
LONG_WINDOW = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def read(path: Path, content: bytes) -> bytes:
    path.write_bytes(content)
    chunks = list(read_chunks(InputFile.open(path)))
    assert [chunk.stored_bytes for chunk in chunks] == sorted(chunk.stored_bytes for chunk in chunks)
    assert not chunks or chunks[-1].stored_bytes == len(content)
    return b"".join(chunk.content for chunk in chunks)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_streams_of_one_or_several_parts_and_empty_ones_are_read(tmp_path: Path, suffix: str, compress) -> None:
    path = tmp_path / f"a.txt.{suffix}"
    for content in (CONTENT, b"", b"x"):
        assert read(path, compress(content)) == content
    assert read(path, compress(CONTENT) + compress(b"more")) == CONTENT + b"more"
    assert read(path, b"") == b""


def test_zstd_with_a_long_window_is_read(tmp_path: Path) -> None:
    compressed = zstandard.ZstdCompressor(compression_params=LONG_WINDOW).compress(CONTENT)
    assert read(tmp_path / "a.zst", compressed) == CONTENT


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_damaged_file_is_reported(tmp_path: Path, suffix: str, compress) -> None:
    path = tmp_path / f"a.txt.{suffix}"
    whole = compress(CONTENT)
    for content in (b"not an archive", whole[:3], whole[:-5], whole[: len(whole) // 2], whole + b"trailing bytes"):
        with pytest.raises(DataError, match=rf"a\.txt\.{suffix}: damaged (gzip|zstd) file: \w+"):
            read(path, content)


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".zst", zstd)])
def test_compressed_file_is_read_at_random(tmp_path: Path, suffix: str, compress) -> None:
    path = tmp_path / f"a.parquet{suffix}"
    path.write_bytes(compress(CONTENT))
    with open_seekable(InputFile.open(path)) as file:
        assert file.read(1000) == CONTENT[:1000]
        file.seek(299_000)
        assert file.read() == CONTENT[299_000:]
