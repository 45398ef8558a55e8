"""Tests of the shard format against Megatron's own reader and writer, and with damaged files."""

import importlib
import struct
import warnings
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.indexed import IndexedShard, IndexedShardWriter, bin_path, idx_path, token_dtype
from data.source import TokenSource

DOCUMENTS = [[], [5, 6, 7], [], [], [8], list(range(100)), []]
documents_strategy = st.lists(st.lists(st.integers(0, 65_535), max_size=8), max_size=8)


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and Apex
        return importlib.import_module("megatron.core.datasets.indexed_dataset")


def read_documents(shard: IndexedShard) -> list[list[int]]:
    offsets = shard.document_offsets.tolist()
    return [shard.read(start, stop).tolist() for start, stop in pairwise(offsets)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(documents=documents_strategy)
def test_written_documents_are_read_back(write_shard, documents: list[list[int]]) -> None:
    shard = IndexedShard.open(write_shard("shard", documents))
    assert read_documents(shard) == documents
    assert shard.num_documents == len(documents)
    assert shard.num_tokens == sum(map(len, documents))


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<i4", "<i8", "<u2"])
def test_all_integer_dtypes_are_supported(write_shard, dtype: str) -> None:
    shard = IndexedShard.open(write_shard("shard", DOCUMENTS, dtype))
    assert shard.dtype == np.dtype(dtype)
    assert read_documents(shard) == DOCUMENTS


def test_token_dtype_equals_megatrons(megatron: ModuleType) -> None:
    for vocab_size in (1, 65_499, 65_500, 65_536, 200_000):
        assert token_dtype(vocab_size) == megatron.DType.optimal_dtype(vocab_size)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("vocab_size", [1_000, 100_000])
def test_shards_written_by_megatron_are_read(megatron: ModuleType, tmp_path: Path, vocab_size: int) -> None:
    """With documents of several sequences, and empty documents, which have no sequence."""
    dtype = megatron.DType.optimal_dtype(vocab_size)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    builder.end_document()
    for sequences in [[[1, 2, 3], [4]], [[]], [[5, 6]], [[7], [8], [9, 999]]]:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    shard = IndexedShard.open(tmp_path / "theirs")
    assert read_documents(shard) == [[], [1, 2, 3, 4], [], [5, 6], [7, 8, 9, 999]]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_folder_of_megatron_shards_is_one_source(megatron: ModuleType, tmp_path: Path) -> None:
    """The parts have the names that Megatron's preprocessing gives them."""
    tokens = np.random.default_rng(0).integers(0, 50_257, 3000)
    for number, part in enumerate(np.array_split(tokens, 12)):
        prefix = str(tmp_path / f"web_{number}_text_document")
        builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=megatron.DType.optimal_dtype(50_257))
        builder.add_document(torch.from_numpy(part), [100, len(part) - 100])
        builder.finalize(f"{prefix}.idx")
    source = TokenSource.open(tmp_path)
    windows = np.empty((source.num_windows(64), 65), np.int64)
    for number, window in enumerate(windows):
        source.read_window(number, 64, window)
    assert len(windows) == 46
    assert np.array_equal(windows[:, :-1].ravel(), tokens[: 46 * 64])
    assert source.document_starts(3, 64).tolist() == [58]


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_megatron_reads_our_shards(megatron: ModuleType, write_shard, dtype: str) -> None:
    prefix = write_shard("ours", DOCUMENTS, dtype)
    theirs = megatron.IndexedDataset(str(prefix))
    assert [theirs[number].tolist() for number in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_our_files_equal_megatrons_byte_for_byte(megatron: ModuleType, write_shard, tmp_path: Path, dtype: str) -> None:
    prefix = write_shard("ours", DOCUMENTS, dtype)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    for document in DOCUMENTS:
        builder.add_document(np.array(document, np.int64), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for path in (bin_path, idx_path):
        assert path(prefix).read_bytes() == path(tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("path", [bin_path, idx_path])
def test_missing_file_is_named(write_shard, path) -> None:
    prefix = write_shard("shard", DOCUMENTS)
    path(prefix).unlink()
    with pytest.raises(DataError, match=path(prefix).name):
        IndexedShard.open(prefix)


@pytest.mark.parametrize("path", [bin_path, idx_path])
@pytest.mark.parametrize("change_bytes", [-1, +1])
def test_error_about_a_wrong_size_names_the_file_and_both_sizes(write_shard, path, change_bytes: int) -> None:
    prefix = write_shard("shard", DOCUMENTS)
    content = path(prefix).read_bytes()
    path(prefix).write_bytes(content[:-1] if change_bytes < 0 else content + b"\0")
    with pytest.raises(DataError) as error:
        IndexedShard.open(prefix)
    message = str(error.value)
    assert path(prefix).name in message
    assert f"{len(content) + change_bytes} bytes found" in message
    assert f"{len(content)} expected" in message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(length=st.integers(0, 400))
def test_truncated_index_is_an_error(write_shard, length: int) -> None:
    prefix = write_shard("shard", DOCUMENTS)
    content = idx_path(prefix).read_bytes()
    idx_path(prefix).write_bytes(content[: min(length, len(content) - 1)])
    with pytest.raises(DataError, match=r"shard\.idx"):
        IndexedShard.open(prefix)


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"X", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "format version 2"),
        (17, b"\x07", "dtype code 7"),
        (17, b"\x63", "dtype code 99"),
        (18, struct.pack("<Q", 2**60), "bytes found"),
        (34 + 4, struct.pack("<i", -3), "sequence 1"),
        (34 + 28 + 16, struct.pack("<q", 4), "sequence 2"),
        (34 + 84, struct.pack("<q", 1), "do not run from 0"),
        (34 + 84 + 16, struct.pack("<q", 6), "document 2"),
    ],
)
def test_damaged_index_is_an_error(write_shard, offset: int, new: bytes, message: str) -> None:
    prefix = write_shard("shard", DOCUMENTS)
    content = bytearray(idx_path(prefix).read_bytes())
    content[offset : offset + len(new)] = new
    idx_path(prefix).write_bytes(content)
    with pytest.raises(DataError, match=message):
        IndexedShard.open(prefix)


def test_shard_may_have_no_documents(write_shard) -> None:
    shard = IndexedShard.open(write_shard("shard", []))
    assert (shard.num_tokens, shard.num_documents) == (0, 0)
    assert shard.read(0, 0).tolist() == []


def test_reading_outside_the_shard_is_an_error(write_shard) -> None:
    shard = IndexedShard.open(write_shard("shard", [[1, 2]]))
    for start, stop in [(-1, 1), (0, 3), (2, 1)]:
        with pytest.raises(IndexError):
            shard.read(start, stop)


def test_failure_while_writing_leaves_no_files(tmp_path: Path) -> None:
    writer = IndexedShardWriter(tmp_path / "shard", np.dtype("<u2"))
    with pytest.raises(DataError), writer:
        writer.add_document(np.array([70_000]))
    assert list(tmp_path.iterdir()) == []


def test_unfinished_shard_does_not_have_its_final_name(tmp_path: Path) -> None:
    writer = IndexedShardWriter(tmp_path / "shard", np.dtype("<u2"))
    writer.add_document(np.arange(10))
    assert not bin_path(tmp_path / "shard").exists()
    assert not idx_path(tmp_path / "shard").exists()
    writer.abort()


@pytest.mark.parametrize("token", [-1, 65_536])
def test_id_that_does_not_fit_the_dtype_is_an_error(tmp_path: Path, token: int) -> None:
    with (
        pytest.raises(DataError, match="do not fit uint16"),
        IndexedShardWriter(tmp_path / "shard", np.dtype("<u2")) as writer,
    ):
        writer.add_document(np.array([token]))
