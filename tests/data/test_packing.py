"""Tests of documents within windows (positions, ignored targets, boundaries from the index) against plain loops."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.indexed import IndexedShard, bin_path, idx_path
from data.loader import IGNORE, BatchGeometry, StepBatch, StepLoader, validation_batches
from data.order import SampleOrder
from data.packing import UNMASKED, Packing, document_positions, drop_targets
from data.source import TokenSource
from tests.data.test_source import write_manifest

VOCAB_SIZE = 1000
SEQ_LEN = 6
PACKINGS = [Packing(True, True), Packing(True, False), Packing(False, False), UNMASKED]
lengths_of_shards = st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4)


def write_source(write_shard: Callable[..., Path], folder: Path, shards: list[list[int]]) -> TokenSource:
    """Writes shards of documents with these lengths; every token is the number of tokens before it."""
    first, names = 0, []
    for number, lengths in enumerate(shards):
        documents = []
        for length in lengths:
            documents.append(range(first, first + length))
            first += length
        write_shard(f"shard-{number}", documents)
        names.append(f"shard-{number}")
    write_manifest(folder, names)
    return TokenSource.open(folder)


def expected_row(lengths: list[int], window: int, packing: Packing) -> tuple[list[int], list[int]]:
    """Computes (positions, targets) of a window token by token; tokens are numbered as in `write_source`."""
    ends = set(np.cumsum(lengths).tolist())
    positions, targets, position = [], [], 0
    for token in range(window * SEQ_LEN, (window + 1) * SEQ_LEN):
        if token in ends:
            position = 0
        positions.append(position)
        position += 1
        is_first_of_document, is_last_of_document = token + 1 in ends, token + 2 in ends
        is_dropped = (packing.mask_documents and is_first_of_document) or (not packing.eod_loss and is_last_of_document)
        targets.append(IGNORE if is_dropped else token + 1)
    return positions, targets


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(shards=lengths_of_shards, packing=st.sampled_from(PACKINGS), seed=st.integers(0, 5))
def test_batches_equal_a_loop_over_tokens(
    write_shard, tmp_path: Path, shards: list[list[int]], packing: Packing, seed: int
) -> None:
    """With empty documents and shards, documents that span windows, and boundaries anywhere in a window."""
    source = write_source(write_shard, tmp_path, [*shards, [9, 1, 4]])
    lengths = [length for shard in [*shards, [9, 1, 4]] for length in shard]
    num_windows = source.num_windows(SEQ_LEN)
    order = SampleOrder([num_windows], [1.0], seed)
    geometry = BatchGeometry(samples_per_step=3, micro_batch_size=2, accumulation=2, world_size=1)
    with StepLoader([source], order, geometry, SEQ_LEN, 0, 0, VOCAB_SIZE, packing=packing) as loader:
        for number in range(4):
            step = next(loader)
            check_rows(step, order.locate(3 * number + np.arange(3)).window.tolist(), lengths, packing)
    batches = list(validation_batches(source, SEQ_LEN, 100, 2, 0, 1, VOCAB_SIZE, packing))
    check_rows(StepBatch(batches, 0, count_targets(batches)), list(range(num_windows)), lengths, packing)


def check_rows(step: StepBatch, windows: list[int], lengths: list[int], packing: Packing) -> None:
    assert step.num_targets == count_targets(step.micro_batches)
    tokens, targets = (
        torch.cat([getattr(batch, name) for batch in step.micro_batches]).tolist() for name in ("tokens", "targets")
    )
    positions = None
    if packing.mask_documents:
        assert all(batch.positions.dtype == torch.int32 for batch in step.micro_batches)
        positions = torch.cat([batch.positions for batch in step.micro_batches]).tolist()
    else:
        assert all(batch.positions is None for batch in step.micro_batches)
    for row, window in enumerate(windows):
        expected_positions, expected_targets = expected_row(lengths, window, packing)
        assert tokens[row] == list(range(window * SEQ_LEN, (window + 1) * SEQ_LEN))
        assert targets[row] == expected_targets
        assert positions is None or positions[row] == expected_positions
    for row in range(len(windows), len(targets)):
        assert targets[row] == [IGNORE] * SEQ_LEN
        assert positions is None or positions[row] == list(range(SEQ_LEN))


def count_targets(batches: list) -> int:
    return sum(int((batch.targets != IGNORE).sum()) for batch in batches)


def test_masked_documents_are_independent_of_their_neighbours(write_shard, tmp_path: Path) -> None:
    """In a window as long as the source, the targets are each document's own tokens from the second on."""
    source = TokenSource.open(write_shard("a", [range(10, 15), [20], range(30, 33), []]))
    (batch,) = validation_batches(source, 8, 1, 1, 0, 1, VOCAB_SIZE, Packing(mask_documents=True))
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 14, 20, 30, 31]]
    assert batch.targets.tolist() == [[11, 12, 13, 14, IGNORE, IGNORE, 31, 32]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 0, 1]]
    (batch,) = validation_batches(source, 8, 1, 1, 0, 1, VOCAB_SIZE, Packing(mask_documents=True, eod_loss=False))
    assert batch.targets.tolist() == [[11, 12, 13, IGNORE, IGNORE, IGNORE, 31, IGNORE]]
    (batch,) = validation_batches(source, 8, 1, 1, 0, 1, VOCAB_SIZE, Packing(eod_loss=False))
    assert batch.targets.tolist() == [[11, 12, 13, IGNORE, IGNORE, 30, 31, IGNORE]]
    assert batch.positions is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=30), data=st.data())
def test_documents_may_have_several_sequences(tmp_path: Path, documents: list[list[int]], data: st.DataObject) -> None:
    """Megatron writes these with `--split-sentences`; here the index is written byte by byte."""
    lengths = [length for document in documents for length in document]
    num_tokens = sum(lengths)
    first_sequence = np.cumsum([0] + [len(document) for document in documents])
    np.zeros(num_tokens, "<i4").tofile(bin_path(tmp_path / "s"))
    with idx_path(tmp_path / "s").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + (4).to_bytes(1, "little"))
        file.write(np.array([len(lengths), len(first_sequence)], "<u8").tobytes())
        file.write(np.array(lengths, "<i4").tobytes())
        file.write((4 * np.cumsum([0, *lengths])[:-1]).astype("<i8").tobytes())
        file.write(first_sequence.astype("<i8").tobytes())
    shard = IndexedShard.open(tmp_path / "s")
    starts = np.cumsum([0] + [sum(document) for document in documents])[:-1]
    start = data.draw(st.integers(0, num_tokens))
    stop = data.draw(st.integers(start, num_tokens))
    assert shard.document_starts(start, stop).tolist() == [int(one) for one in starts if start <= one < stop]


@given(rows=st.lists(st.lists(st.integers(1, SEQ_LEN + 1)).map(sorted), min_size=1, max_size=4))
def test_positions_restart_at_every_document(rows: list[list[int]]) -> None:
    starts = [np.array(row, np.int64) for row in rows]
    expected = [[t - max([0, *(s for s in row if s <= t)]) for t in range(SEQ_LEN)] for row in rows]
    assert document_positions(starts, SEQ_LEN).tolist() == expected


def test_dropped_targets_are_counted_once() -> None:
    targets = np.arange(6)[None].copy()
    assert drop_targets(targets, [np.array([2, 2, 3, 7])], Packing(True, False)) == 4
    assert targets.tolist() == [[IGNORE, IGNORE, IGNORE, 3, 4, IGNORE]]


@pytest.mark.parametrize("packing", PACKINGS)
def test_digest_includes_positions_and_is_the_same_after_a_resume(
    write_shard, tmp_path: Path, packing: Packing
) -> None:
    source = write_source(write_shard, tmp_path, [[7, 2, 30, 1, 1, 50]])
    order = SampleOrder([source.num_windows(SEQ_LEN)], [1.0], 0)
    geometry = BatchGeometry(3, 2, 2, 1)
    digests = []
    for first_sample in (0, 6):
        with StepLoader([source], order, geometry, SEQ_LEN, 0, first_sample, VOCAB_SIZE, packing=packing) as loader:
            digests.append([next(loader).digest() for _ in range(4)])
    assert digests[0][2:] == digests[1][:2]
    if packing.mask_documents:
        with StepLoader([source], order, geometry, SEQ_LEN, 0, 0, VOCAB_SIZE) as loader:
            assert next(loader).digest() != digests[0][0]
