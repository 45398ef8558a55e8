"""`--dataset`: what the `datasets` library loads, as a source of texts."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from data.blocks import Block, ReadOptions, record_blocks
from data.errors import DataError

_ROWS_AT_ONCE = 64
_SAVED_NAMES = ("state.json", "dataset_dict.json")  # in folders that `save_to_disk` has made


@dataclass(frozen=True)
class DatasetRequest:
    """What to load.

    Attributes:
        name: a data set of the Hugging Face Hub, a kind of files such as "json", or a folder: one with data files,
            or one that `save_to_disk` has made.
        config: name of its configuration; None for the default one.
        split: name of the split, or an expression that the library reads, such as "train[:1%]".
        data_files: files, globs or addresses, for a kind of files.
        revision: of a data set of the Hub; None for the newest.
        streaming: read while downloading, and keep nothing on the disk.
    """

    name: str
    config: str | None = None
    split: str = "train"
    data_files: tuple[str, ...] = ()
    revision: str | None = None
    streaming: bool = False


class DatasetSource:
    """A data set as a source."""

    def __init__(self, request: DatasetRequest) -> None:
        self._request = request

    @property
    def size_bytes(self) -> int:
        """Of the texts and all other columns, if the data set tells."""
        size_bytes = self._dataset.info.dataset_size
        return size_bytes if size_bytes and self._num_rows else 0

    def describe(self) -> dict[str, Any]:
        """Name and version, for the manifest; the same data set gives the same."""
        request = self._request
        version = xxhash.xxh3_128_hexdigest(self._loaded[1].encode())
        record = {"dataset": request.name, "config": request.config, "split": request.split, "xxh3": version}
        return {name: value for name, value in record.items() if value is not None}

    def read_blocks(self, options: ReadOptions) -> Iterator[tuple[Block, int]]:
        """See `Source`.

        Raises:
            DataError: the data set cannot be loaded or has no such column of text.
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
            for table in dataset.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
                check_text_column(table.schema, text_key, self._label)
                done_rows += len(table)
                done_bytes = self.size_bytes * done_rows // num_rows if num_rows else 0
                yield texts_of(table.column(text_key)), done_bytes
        except DataError:
            raise
        except Exception as error:  # whatever reading files and the network may end in
            raise _loading_error(self._label, error) from None


def _load(request: DatasetRequest, label: str) -> tuple[Any, str]:
    """The data set, and what tells its version."""
    try:
        import datasets
    except ImportError:
        raise DataError(f'{label}: needs the library `datasets`: pip install "steadyhead[datasets]"') from None
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
    except Exception as error:  # the library raises errors of many kinds, its dependencies others
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
    """The error, and what it came from, which says more in the case of some."""
    if isinstance(error, StopIteration):  # the library looks at the first row of a stream
        return DataError(f"{label}: a file is empty, or there is no row at all")
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
        cause = cause.__cause__
    return DataError(f"{label}: {'; from '.join(messages)}")
