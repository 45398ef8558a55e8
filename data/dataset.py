"""`--dataset`: reads texts from a dataset of the `datasets` library."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from data.blocks import Block, ReadOptions, record_blocks
from data.errors import DataError

_ROWS_PER_BATCH = 64
_SAVED_NAMES = ("state.json", "dataset_dict.json")  # files in folders written by `save_to_disk`


@dataclass(frozen=True)
class DatasetRequest:
    """Which dataset to load, and how.

    Attributes:
        name: A dataset on the Hugging Face Hub, a file type such as "json", or a folder: one with data files or one
            written by `save_to_disk`.
        config: Name of the dataset's configuration; None for the default one.
        split: Name of a split, or an expression that the library understands, such as "train[:1%]".
        data_files: Files, globs or URLs, if `name` is a file type.
        revision: Revision of a dataset on the Hub; None for the newest.
        streaming: Whether to read the dataset while it is downloaded, without storing it on disk.
    """

    name: str
    config: str | None = None
    split: str = "train"
    data_files: tuple[str, ...] = ()
    revision: str | None = None
    streaming: bool = False


class DatasetSource:
    """A dataset as a source."""

    def __init__(self, request: DatasetRequest) -> None:
        self._request = request

    @property
    def size_bytes(self) -> int:
        """Size of the texts and all other columns, 0 if the dataset does not state it."""
        size_bytes = self._dataset.info.dataset_size
        return size_bytes if size_bytes and self._num_rows else 0

    def describe(self) -> dict[str, Any]:
        """Return name and version for the manifest, the same ones for the same dataset."""
        request = self._request
        version = xxhash.xxh3_128_hexdigest(self._loaded[1].encode())
        record = {"dataset": request.name, "config": request.config, "split": request.split, "xxh3": version}
        return {name: value for name, value in record.items() if value is not None}

    def read_blocks(self, options: ReadOptions) -> Iterator[tuple[Block, int]]:
        """See `Source`.

        Raises:
            DataError: If the dataset cannot be loaded or has no such text column.
        """
        return record_blocks(self._label, "row", self._texts(options.text_key))

    @property
    def _label(self) -> str:
        return f"--dataset {self._request.name}"

    @cached_property
    def _loaded(self) -> tuple[Any, str]:
        return _load(self._request, self._label)

    @property
    def _dataset(self) -> Any:
        return self._loaded[0]

    @property
    def _num_rows(self) -> int | None:
        rows = getattr(self._dataset, "num_rows", None)
        return rows if isinstance(rows, int) else None

    def _texts(self, text_key: str) -> Iterator[tuple[list[bytes | str | None], int]]:
        from data.tables import check_text_column, texts_of

        dataset = self._dataset
        num_rows, done_rows = self._num_rows, 0
        if dataset.column_names is not None and text_key in dataset.column_names:
            dataset = dataset.select_columns([text_key])
        try:
            for table in dataset.with_format("arrow").iter(batch_size=_ROWS_PER_BATCH):
                check_text_column(table.schema, text_key, self._label)
                done_rows += len(table)
                done_bytes = self.size_bytes * done_rows // num_rows if num_rows else 0
                yield texts_of(table.column(text_key)), done_bytes
        except DataError:
            raise
        except Exception as error:  # reading files and the network raises errors of many kinds
            raise _loading_error(self._label, error) from None


def _load(request: DatasetRequest, label: str) -> tuple[Any, str]:
    """Return the dataset, and a string that identifies its version."""
    try:
        import datasets
    except ImportError:
        raise DataError(f'{label}: requires the library `datasets`: pip install "steadyhead[datasets]"') from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if any((Path(request.name) / name).is_file() for name in _SAVED_NAMES):
            return _load_saved(datasets, request)
        given = {
            "name": request.config,
            "data_files": list(request.data_files) or None,
            "revision": request.revision,
        }
        builder = datasets.load_dataset_builder(request.name, **given)
        files = builder.config.data_files or {}
        version = [(str(split), list(found), found.origin_metadata) for split, found in files.items()]
        dataset = datasets.load_dataset(request.name, **given, split=request.split, streaming=request.streaming)
    except Exception as error:  # the library and its dependencies raise errors of many kinds
        raise _loading_error(label, error) from None
    return dataset, f"{builder.hash} {version}"


def _load_saved(datasets: Any, request: DatasetRequest) -> tuple[Any, str]:
    loaded = datasets.load_from_disk(request.name)
    if isinstance(loaded, datasets.DatasetDict):
        if request.split not in loaded:
            raise ValueError(f"no split {request.split!r} (--split); splits here: {', '.join(loaded)}")
        loaded = loaded[request.split]
    return loaded, str(loaded._fingerprint)


def _loading_error(label: str, error: Exception) -> DataError:
    """Return a DataError with the messages of the error and of its causes, which are sometimes more specific."""
    if isinstance(error, StopIteration):  # raised when the library reads the first row of a stream
        return DataError(f"{label}: a file is empty, or the dataset has no rows")
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
        cause = cause.__cause__
    return DataError(f"{label}: {'; caused by '.join(messages)}")
