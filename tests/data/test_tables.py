"""Tests of Parquet and Arrow files: all types of text columns, plain and compressed, and damaged files."""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data.blocks import FileSource, ReadOptions
from data.errors import DataError
from data.inputs import InputFile
from data.readers import read_documents

TEXTS = [f"{number} é🚀\r\n" for number in range(300)]
KINDS = [
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
]
COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def make_table(kind: pa.DataType, texts: list = TEXTS) -> pa.Table:
    values = pa.array(texts, pa.string())
    column = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
    return pa.table({"id": pa.array(range(len(texts))), "text": column})


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)


def write_random_access(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)


def write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=70)


WRITERS = [("parquet", write_parquet), ("arrow", write_stream), ("arrow", write_random_access)]


def read(path: Path, counts: Counter[str] | None = None, **options: str) -> list[str]:
    source = FileSource(InputFile.open(path))
    given = ReadOptions(**options)
    found = list(source.read_blocks(given))
    assert not found or source.size_bytes - 8 <= found[-1][1] <= source.size_bytes  # except for an end marker
    return list(read_documents([block for block, _ in found], given, Counter() if counts is None else counts))


@pytest.mark.parametrize(
    ("suffix", "write", "kind"),
    [(*writer, kind) for writer in WRITERS for kind in KINDS if writer[0] == "arrow" or kind != pa.string_view()],
)
@pytest.mark.parametrize("compression", COMPRESSORS)
def test_every_type_of_text_column_is_read(
    tmp_path: Path, suffix: str, write, kind: pa.DataType, compression: str
) -> None:
    plain = tmp_path / f"a.{suffix}"
    write(make_table(kind), plain)
    path = tmp_path / f"a.{suffix}{compression}"
    path.write_bytes(COMPRESSORS[compression](plain.read_bytes()))
    assert read(path) == [text.replace("\r\n", "\n") for text in TEXTS]


@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_table_may_have_no_rows(tmp_path: Path, suffix: str, write) -> None:
    write(make_table(pa.string(), []), tmp_path / f"a.{suffix}")
    assert read(tmp_path / f"a.{suffix}") == []


@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_missing_and_non_text_columns_are_errors(tmp_path: Path, suffix: str, write) -> None:
    path = tmp_path / f"a.{suffix}"
    write(make_table(pa.string()), path)
    with pytest.raises(DataError, match=rf"a\.{suffix}: no column 'body' \(--text-key\); columns here: id, text"):
        read(path, text_key="body")
    with pytest.raises(DataError, match=rf"a\.{suffix}: column 'id' \(--text-key\) has type int64, expected text"):
        read(path, text_key="id")


@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_rows_without_text_and_undecodable_bytes_follow_the_error_policy(tmp_path: Path, suffix: str, write) -> None:
    path = tmp_path / f"a.{suffix}"
    values = pa.array([b"one", None, b"t\xffo", b"three"], pa.binary())
    write(pa.table({"text": values}), path)
    with pytest.raises(DataError, match=rf"a\.{suffix}: row 1: no text under 'text'"):
        read(path)
    counts: Counter[str] = Counter()
    assert read(path, counts, on_error="skip") == ["one", "three"]
    assert counts == {"documents": 4, "skipped": 2}
    write(pa.table({"text": values.drop_null()}), path)
    with pytest.raises(DataError, match=rf"a\.{suffix}: row 1: byte 1 is 0xFF: not UTF-8"):
        read(path)
    assert read(path, on_error="replace") == ["one", "t\ufffdo", "three"]


@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_duplicate_column_names_are_an_error_and_dots_are_allowed(tmp_path: Path, suffix: str, write) -> None:
    path = tmp_path / f"a.{suffix}"
    write(pa.table([["x"], ["y"]], names=["text", "text"]), path)
    with pytest.raises(DataError, match=r"2 columns are called 'text' \(--text-key\); expected one"):
        read(path)
    write(pa.table({"a": [{"text": "inner"}], "a.text": ["outer"]}), path)
    assert read(path, text_key="a.text") == ["outer"]


@pytest.mark.parametrize("write", [write_stream, write_random_access])
def test_rows_that_point_outside_the_buffers_are_an_error(tmp_path: Path, write) -> None:
    """Such rows occur in an Arrow file with a changed byte."""
    offsets, texts = pa.py_buffer(np.array([0, 2, -5, 4], "<i4")), pa.py_buffer(b"abcd")
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, texts])
    indices = pa.array([0, 7, 1], pa.int32())
    for damaged in (column, pa.DictionaryArray.from_arrays(indices, pa.array(["a", "b"]), safe=False)):
        write(pa.table({"text": damaged}), tmp_path / "bad.arrow")
        with pytest.raises(DataError, match=r"bad\.arrow: not a readable Arrow file: .*(offset|index|out of bounds)"):
            read(tmp_path / "bad.arrow")


def test_damaged_column_names_are_an_error(tmp_path: Path) -> None:
    write_stream(pa.table({"text": ["x"], "other column": [1]}), tmp_path / "bad.arrow")
    content = (tmp_path / "bad.arrow").read_bytes()
    (tmp_path / "bad.arrow").write_bytes(content.replace(b"other", b"oth\xf8r"))
    with pytest.raises(DataError, match=r"bad\.arrow: not a readable Arrow file: .*can't decode byte 0xf8"):
        read(tmp_path / "bad.arrow")


@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_damaged_files_are_errors_in_one_line(tmp_path: Path, suffix: str, write) -> None:
    path = tmp_path / f"a.{suffix}"
    write(make_table(pa.string()), path)
    whole = path.read_bytes()
    for content in (b"", b"PAR1", b"ARROW1", b"other", whole[: len(whole) // 2], whole[:-20]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.{suffix}: not a readable (Parquet|Arrow) file: ") as error:
            read(path)
        assert "\n" not in str(error.value)
