"""Reads the texts in one column of Parquet and Arrow files, a few rows at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import DataError

_ARROW_FILE_MAGIC = b"ARROW1"  # the streaming format begins with the length of the schema instead
_BUFFER_BYTES = 1 << 20


def parquet_columns(
    file: BinaryIO, name: str, text_key: str, size_bytes: int, num_rows: int
) -> Iterator[tuple[list[bytes | str | None], int]]:
    """Yield the texts (UTF-8) of at most `num_rows` rows at a time, and how many of the `size_bytes` have been read.

    Row groups and columns are read incrementally, so that memory does not grow with their size.

    Raises:
        DataError: If the file is damaged, or has no such column, or the column does not contain text.
    """
    with _as_data_errors(name, "Parquet"):
        # Without a buffer, whole columns of a row group would be read at once.
        table = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        check_text_column(table.schema_arrow, text_key, name)
        total_rows = table.metadata.num_rows
        done_rows = 0
        for batch in table.iter_batches(num_rows, columns=[text_key], use_threads=False):
            done_rows += len(batch)
            # By position, since a dot in the name may also be taken for a path into another column.
            column = batch.column(batch.schema.names.index(text_key))
            yield texts_of(column), size_bytes * done_rows // total_rows


def arrow_columns(
    file: BinaryIO, name: str, text_key: str, size_bytes: int, num_rows: int
) -> Iterator[tuple[list[bytes | str | None], int]]:
    """Like `parquet_columns`, for Arrow files in the file format or the streaming format (written by `datasets`)."""
    with _as_data_errors(name, "Arrow"):
        for batch, done_bytes in _arrow_batches(file, name, text_key, size_bytes):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type) or pa.types.is_string_view(column.type):
                column.validate(full=True)  # once instead of for each slice, since slices share their texts
            for start in range(0, len(column), num_rows):
                yield texts_of(column.slice(start, num_rows)), done_bytes


def texts_of(column: pa.Array | pa.ChunkedArray) -> list[bytes | str | None]:
    """Return the text (UTF-8) of each row of a text column; None for null.

    Raises:
        ArrowException: If a row refers to data outside the buffers, as in damaged files.
    """
    column.validate()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    column = column.cast(pa.large_binary())
    column.validate(full=True)
    return column.to_pylist()


def check_text_column(schema: pa.Schema, text_key: str, name: str) -> None:
    """Raise DataError unless the table `name` has exactly one column `text_key` and it contains text."""
    num_columns = schema.names.count(text_key)
    if num_columns == 0:
        columns = ", ".join(schema.names) or "none"
        raise DataError(f"{name}: no column {text_key!r} (--text-key); columns here: {columns}")
    if num_columns > 1:
        raise DataError(f"{name}: {num_columns} columns are called {text_key!r} (--text-key); expected one")
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
        raise DataError(f"{name}: column {text_key!r} (--text-key) has type {kind}, expected text")


def _arrow_batches(file: BinaryIO, name: str, text_key: str, size_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield batches with the one column, and the bytes read so far."""
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
        total_bytes = file.seek(0, 2)
        file.seek(0)
        for batch in pa.ipc.open_stream(file, options=options):
            yield batch, size_bytes * file.tell() // total_bytes


@contextmanager
def _as_data_errors(name: str, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:  # damaged sizes and names
        message = " ".join(str(error).split())
        raise DataError(f"{name}: not a readable {kind} file: {message}") from None
