"""Tests that the loader yields the same samples on any ranks, in any layout and from any starting point.

The reference reads one sample at a time from plain lists, without the loader's layout or threads.
"""

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DataError
from data.loader import (
    IGNORE,
    BatchGeometry,
    MicroBatch,
    StepBatch,
    StepLoader,
    derive_accumulation,
    validation_batches,
)
from data.order import SampleOrder
from data.source import TokenSource

SEQ_LEN = 4
VOCAB_SIZE = 30_000
NUM_WINDOWS = [37, 50, 11]
WEIGHTS = [3.0, 2.0, 0.5]


@pytest.fixture
def sources(write_shard) -> list[TokenSource]:
    """Three sources; token i of source k is 1000·k + i, so that a token identifies its window."""
    opened = []
    for number, num_windows in enumerate(NUM_WINDOWS):
        num_tokens = num_windows * SEQ_LEN + 2
        prefix = write_shard(f"source-{number}", [range(1000 * number, 1000 * number + num_tokens)])
        opened.append(TokenSource.open(prefix))
    return opened


@pytest.fixture
def order(sources: list[TokenSource]) -> SampleOrder:
    return SampleOrder([source.num_windows(SEQ_LEN) for source in sources], WEIGHTS, seed=5)


def make_loader(
    sources: list[TokenSource],
    order: SampleOrder,
    geometry: BatchGeometry,
    rank: int = 0,
    first_sample: int = 0,
    vocab_size: int = VOCAB_SIZE,
    **options: int,
) -> StepLoader:
    return StepLoader(sources, order, geometry, SEQ_LEN, rank, first_sample, vocab_size, **options)


def take(loader: StepLoader, num_steps: int) -> list[StepBatch]:
    with loader:
        return [next(loader) for _ in range(num_steps)]


def reference_rows(order: SampleOrder, first_sample: int, count: int) -> list[list[int]]:
    """Returns the seq_len + 1 tokens of each sample, computed one sample at a time."""
    rows = []
    for sample in range(first_sample, first_sample + count):
        location = order.locate(np.array(sample))
        start = 1000 * int(location.source) + SEQ_LEN * int(location.window)
        rows.append(list(range(start, start + SEQ_LEN + 1)))
    return rows


def rows_of(batches: list[MicroBatch]) -> list[list[int]]:
    """Returns the tokens and the last target of every row that is not padding."""
    rows = []
    for batch in batches:
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            if targets[0] == IGNORE:
                assert targets == [IGNORE] * SEQ_LEN
            else:
                assert targets[:-1] == tokens[1:]
                rows.append([*tokens, targets[-1]])
    return rows


def global_rows(
    sources: list[TokenSource], order: SampleOrder, geometry: BatchGeometry, first_sample: int, num_steps: int
) -> list[list[list[int]]]:
    """Returns, for each step, the rows of all ranks in the order of their slots."""
    steps = [
        take(make_loader(sources, order, geometry, rank, first_sample), num_steps)
        for rank in range(geometry.world_size)
    ]
    return [
        [
            row
            for micro_step in range(geometry.accumulation)
            for rank in range(geometry.world_size)
            for row in rows_of([steps[rank][step].micro_batches[micro_step]])
        ]
        for step in range(num_steps)
    ]


@given(samples_per_step=st.integers(1, 50), micro_batch_size=st.integers(1, 6), world_size=st.integers(1, 6))
def test_slots_partition_a_step(samples_per_step: int, micro_batch_size: int, world_size: int) -> None:
    accumulation = derive_accumulation(samples_per_step, micro_batch_size, world_size)
    geometry = BatchGeometry(samples_per_step, micro_batch_size, accumulation, world_size)
    slots = [geometry.slots(rank) for rank in range(world_size)]
    assert sorted(np.concatenate(slots, axis=None).tolist()) == list(range(geometry.slots_per_step))
    assert geometry.slots_per_step - world_size * micro_batch_size < samples_per_step
    for rank, rank_slots in enumerate(slots):
        assert rank_slots.shape == (accumulation, micro_batch_size)
        for (micro_step, row), slot in np.ndenumerate(rank_slots):
            assert slot == (micro_step * world_size + rank) * micro_batch_size + row


@pytest.mark.parametrize("numbers", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0), (9, 2, 2, 2)])
def test_invalid_geometry_is_an_error(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(DataError):
        BatchGeometry(*numbers)


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "accumulation"),
    [(1, 10, 1), (1, 1, 10), (2, 5, 1), (5, 1, 2), (4, 2, 2), (3, 4, 1), (1, 16, 1), (7, 3, 2), (12, 1, 1)],
)
def test_samples_do_not_depend_on_the_layout(
    sources, order, world_size: int, micro_batch_size: int, accumulation: int
) -> None:
    """Several of these layouts have padding, and some ranks have only padding."""
    geometry = BatchGeometry(10, micro_batch_size, accumulation, world_size)
    for step, rows in enumerate(global_rows(sources, order, geometry, 20, num_steps=3)):
        assert rows == reference_rows(order, 20 + 10 * step, 10)


def test_shapes_dtypes_and_counts(sources, order) -> None:
    geometry = BatchGeometry(samples_per_step=10, micro_batch_size=4, accumulation=2, world_size=2)
    for rank, num_samples in [(0, 6), (1, 4)]:
        (step,) = take(make_loader(sources, order, geometry, rank), 1)
        assert [batch.tokens.shape for batch in step.micro_batches] == [(4, SEQ_LEN)] * 2
        assert all(batch.tokens.dtype == batch.targets.dtype == torch.int64 for batch in step.micro_batches)
        assert step.num_targets == num_samples * SEQ_LEN
        assert step.num_targets == sum((batch.targets != IGNORE).sum().item() for batch in step.micro_batches)
        padding = torch.cat([batch.tokens for batch in step.micro_batches])[num_samples:]
        assert padding.eq(0).all()


@pytest.mark.parametrize("resume_step", [1, 2, 7, 29, 30, 31, 300])
def test_resumed_batches_equal_those_of_the_uninterrupted_run(sources, order, resume_step: int) -> None:
    geometry = BatchGeometry(samples_per_step=9, micro_batch_size=2, accumulation=3, world_size=2)
    for rank in range(2):
        whole = take(make_loader(sources, order, geometry, rank), resume_step + 4)
        resumed = take(make_loader(sources, order, geometry, rank, first_sample=9 * resume_step), 4)
        assert [step.first_sample for step in resumed] == [9 * (resume_step + later) for later in range(4)]
        assert [step.digest() for step in resumed] == [step.digest() for step in whole[resume_step:]]


@pytest.mark.parametrize("first_sample", [1, 3, 4090, 4095, 4097])
def test_loader_starts_at_any_sample(sources, order, first_sample: int) -> None:
    geometry = BatchGeometry(samples_per_step=3, micro_batch_size=3, accumulation=1, world_size=1)
    (step,) = take(make_loader(sources, order, geometry, first_sample=first_sample), 1)
    assert rows_of(step.micro_batches) == reference_rows(order, first_sample, 3)


def test_each_epoch_has_every_window_once_after_a_resume_with_other_ranks(sources) -> None:
    """The run stops in the first epoch and resumes with another number of ranks."""
    source, num_windows = sources[1], NUM_WINDOWS[1]
    order = SampleOrder([num_windows], [1.0], seed=8)
    before = BatchGeometry(samples_per_step=5, micro_batch_size=5, accumulation=1, world_size=1)
    after = BatchGeometry(samples_per_step=5, micro_batch_size=1, accumulation=3, world_size=2)
    stop_step = 4
    steps = global_rows([source], order, before, 0, stop_step)
    steps += global_rows([source], order, after, 5 * stop_step, 3 * num_windows // 5 - stop_step)
    windows = [(row[0] - 1000) // SEQ_LEN for rows in steps for row in rows]
    for epoch in range(3):
        assert sorted(windows[epoch * num_windows :][:num_windows]) == list(range(num_windows))


def test_four_ranks_read_every_sample_of_three_sources_once(sources, order) -> None:
    num_samples = 3 * 4096
    geometry = BatchGeometry(samples_per_step=64, micro_batch_size=4, accumulation=4, world_size=4)
    seen = Counter(
        row[0]
        for rank in range(4)
        for step in take(make_loader(sources, order, geometry, rank), num_samples // 64)
        for row in rows_of(step.micro_batches)
    )
    location = order.locate(np.arange(num_samples))
    expected = Counter((1000 * location.source + SEQ_LEN * location.window).tolist())
    assert seen == expected
    for number, num_windows in enumerate(NUM_WINDOWS):
        counts = [seen[1000 * number + SEQ_LEN * window] for window in range(num_windows)]
        assert max(counts) - min(counts) <= 1  # every window is read equally often


@pytest.mark.parametrize("prefetch_steps", [1, 5])
def test_prefetching_does_not_change_the_batches(sources, order, prefetch_steps: int) -> None:
    geometry = BatchGeometry(samples_per_step=6, micro_batch_size=3, accumulation=2, world_size=1)
    steps = take(make_loader(sources, order, geometry, prefetch_steps=prefetch_steps), 5)
    assert [rows_of(step.micro_batches) for step in steps] == [reference_rows(order, 6 * step, 6) for step in range(5)]


def test_digest_differs_between_batches(sources, order) -> None:
    geometry = BatchGeometry(samples_per_step=6, micro_batch_size=3, accumulation=2, world_size=1)
    digests = [step.digest() for step in take(make_loader(sources, order, geometry), 5)]
    assert len(set(digests)) == 5


def test_closing_the_loader_ends_its_thread(sources, order) -> None:
    geometry = BatchGeometry(samples_per_step=6, micro_batch_size=3, accumulation=2, world_size=1)
    before = set(threading.enumerate())
    loader = make_loader(sources, order, geometry)
    next(loader)
    assert set(threading.enumerate()) != before
    loader.close()
    loader.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(StopIteration):
        next(loader)


@pytest.mark.parametrize(("dtype", "bad_id"), [("<u2", 30_000), ("<u2", 65_535), ("<i4", -1), ("<i4", 10**6)])
def test_error_about_an_invalid_id_names_file_and_token(write_shard, dtype: str, bad_id: int) -> None:
    tokens = list(range(101))
    tokens[77] = bad_id
    source = TokenSource.open(write_shard("bad", [tokens[:50], tokens[50:]], dtype))
    order = SampleOrder([source.num_windows(SEQ_LEN)], [1.0], seed=0)
    geometry = BatchGeometry(samples_per_step=5, micro_batch_size=5, accumulation=1, world_size=1)
    before = set(threading.enumerate())
    loader = make_loader([source], order, geometry)
    with pytest.raises(DataError, match=rf"bad\.bin: token 77 has id {bad_id:,}; expected 0 to 29,999"):
        list(loader)
    assert set(threading.enumerate()) == before
    with pytest.raises(StopIteration):
        next(loader)


def test_largest_id_is_allowed(sources, order) -> None:
    geometry = BatchGeometry(samples_per_step=98, micro_batch_size=98, accumulation=1, world_size=1)
    largest = 2000 + NUM_WINDOWS[2] * SEQ_LEN  # the last target of the last window
    take(make_loader(sources, order, geometry, vocab_size=largest + 1), 10)
    with pytest.raises(DataError, match=r"source-2\.bin"):
        take(make_loader(sources, order, geometry, vocab_size=largest), 10)


@pytest.mark.parametrize("num_samples", [1, 3, 10, 49, 50, 1000])
@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 1), (1, 7), (2, 4), (8, 3), (64, 1)])
def test_validation_set_is_the_same_on_any_number_of_ranks(
    sources, num_samples: int, world_size: int, micro_batch_size: int
) -> None:
    source, num_windows = sources[1], NUM_WINDOWS[1]
    ranks = [
        list(validation_batches(source, SEQ_LEN, num_samples, micro_batch_size, rank, world_size, VOCAB_SIZE))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch.tokens.shape == (micro_batch_size, SEQ_LEN) for batches in ranks for batch in batches)
    count = min(num_samples, num_windows)
    expected = [1000 + SEQ_LEN * (number * num_windows // count) for number in range(count)]
    assert sorted(row[0] for batches in ranks for row in rows_of(batches)) == expected
    assert len(set(expected)) == count


def test_validation_source_shorter_than_a_sequence_is_an_error(write_shard) -> None:
    source = TokenSource.open(write_shard("short", [[1, 2, 3, 4]]))
    with pytest.raises(DataError, match="4 tokens; one sequence of 4 needs 5"):
        list(validation_batches(source, SEQ_LEN, 1, 1, 0, 1, VOCAB_SIZE))


def test_validation_checks_ids(write_shard) -> None:
    source = TokenSource.open(write_shard("bad", [range(100)]))
    with pytest.raises(DataError, match=r"bad\.bin: token 50 has id 50"):
        list(validation_batches(source, SEQ_LEN, 100, 1, 0, 1, vocab_size=50))
