"""Parquet and Arrow files: the texts in one column, a few rows at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import DataError

_ARROW_FILE_MAGIC = b"ARROW1"  # a stream begins with the length of its schema instead
_BUFFER_BYTES = 1 << 20


def parquet_columns(
    file: BinaryIO, name: str, text_key: str, size_bytes: int, num_rows: int
) -> Iterator[tuple[list[bytes | str | None], int]]:
    """UTF-8 of at most `num_rows` rows at a time, and how many of the `size_bytes` they are at.

    Row groups and columns are read piece by piece, so that memory does not grow with their size.

    Raises:
        DataError: the file is damaged, or has no such column or none of text.
    """
    with _as_data_errors(name, "Parquet"):
        # Buffered: without, whole columns of a row group would be read at once.
        table = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        check_text_column(table.schema_arrow, text_key, name)
        total_rows = table.metadata.num_rows
        done_rows = 0
        for batch in table.iter_batches(num_rows, columns=[text_key], use_threads=False):
            done_rows += len(batch)
            # By its place: a dot in the name is also read as a path into another column.
            column = batch.column(batch.schema.names.index(text_key))
            yield texts_of(column), size_bytes * done_rows // total_rows


def arrow_columns(
    file: BinaryIO, name: str, text_key: str, size_bytes: int, num_rows: int
) -> Iterator[tuple[list[bytes | str | None], int]]:
    """The same of an Arrow file of either kind, with random access or streaming (as `datasets` writes them)."""
    with _as_data_errors(name, "Arrow"):
        for batch, done_bytes in _arrow_batches(file, name, text_key, size_bytes):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type) or pa.types.is_string_view(column.type):
                column.validate(full=True)  # once, and not for each of the slices, which share their texts
            for start in range(0, len(column), num_rows):
                yield texts_of(column.slice(start, num_rows)), done_bytes


def texts_of(column: pa.Array | pa.ChunkedArray) -> list[bytes | str | None]:
    """UTF-8 of each row of a column of text; None for null.

    Raises:
        ArrowException: a row points to where there is nothing, as in damaged files.
    """
    column.validate()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    column = column.cast(pa.large_binary())
    column.validate(full=True)
    return column.to_pylist()


def check_text_column(schema: pa.Schema, text_key: str, name: str) -> None:
    """Raises DataError unless a table called `name` has a column `text_key` of text."""
    num_columns = schema.names.count(text_key)
    if num_columns == 0:
        columns = ", ".join(schema.names) or "none"
        raise DataError(f"{name}: no column {text_key!r} (--text-key); columns here: {columns}")
    if num_columns > 1:
        raise DataError(f"{name}: {num_columns} columns are called {text_key!r} (--text-key); one expected")
    kind = schema.field(text_key).type
    value_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    if not any(test(value_kind) for test in tests):
        raise DataError(f"{name}: column {text_key!r} (--text-key) holds {kind}, text expected")


def _arrow_batches(file: BinaryIO, name: str, text_key: str, size_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Batches with the one column, and the bytes read by then."""
    is_random_access = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
    file.seek(0)
    opened = pa.ipc.open_file(file) if is_random_access else pa.ipc.open_stream(file)
    check_text_column(opened.schema, text_key, name)
    file.seek(0)
    options = pa.ipc.IpcReadOptions(included_fields=[opened.schema.names.index(text_key)])
    if is_random_access:
        reader = pa.ipc.open_file(file, options=options)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number), size_bytes * (number + 1) // reader.num_record_batches
    else:
        unpacked_bytes = file.seek(0, 2)
        file.seek(0)
        for batch in pa.ipc.open_stream(file, options=options):
            yield batch, size_bytes * file.tell() // unpacked_bytes


@contextmanager
def _as_data_errors(name: str, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:  # sizes and names may be anything
        message = " ".join(str(error).split())
        raise DataError(f"{name}: not a readable {kind} file: {message}") from None
