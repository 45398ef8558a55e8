"""The data order, against counting and brute force."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.order import BLOCK_SAMPLES, SampleOrder, _ceil_sqrt, permute, samples_per_block

weights_strategy = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)
seeds = st.integers(-(2**63), 2**64)


def locate_all(order: SampleOrder, num_samples: int) -> list[tuple[int, int, int]]:
    location = order.locate(np.arange(num_samples))
    return list(zip(location.source.tolist(), location.epoch.tolist(), location.window.tolist(), strict=True))


@settings(deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    images = permute(np.arange(size), np.array(size), np.array(key, np.uint64))
    assert sorted(images.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**62, 2**62 - 1, 10**9, 999_999_937, 2**31 + 1, (10**6 + 3) ** 2])
def test_permute_large_ranges(size: int) -> None:
    points = np.concatenate([np.arange(1000), size - 1 - np.arange(1000), np.arange(1000) * (size // 1000)])
    points = np.unique(points)
    images = permute(points, np.array(size), np.array(7, np.uint64))
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(points)


@pytest.mark.parametrize("root", [1, 2, 3, 1000, 2**26 + 1, 2**27, 2**31 - 1, 2**31])
def test_root_is_exact_beyond_the_precision_of_floats(root: int) -> None:
    sizes = [size for size in (root**2 - 1, root**2, root**2 + 1) if size >= 1]
    expected = [math.isqrt(size - 1) + 1 for size in sizes]
    assert _ceil_sqrt(np.array(sizes, np.uint64)).tolist() == expected


def test_permute_is_elementwise() -> None:
    sizes = np.array([5, 17, 1000, 5])
    keys = np.array([1, 2, 3, 4], np.uint64)
    together = permute(np.full(4, 3), sizes, keys)
    apart = [permute(np.array(3), size, key).item() for size, key in zip(sizes, keys, strict=True)]
    assert together.tolist() == apart


def test_every_permutation_of_four_is_about_equally_likely() -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, (24_000, 1), dtype=np.uint64)
    counts = Counter(map(tuple, permute(np.arange(4), np.array(4), keys).tolist()))
    assert len(counts) == math.factorial(4)
    assert max(counts.values()) < 1_200  # 1,000 expected, standard deviation 31
    assert min(counts.values()) > 800


def test_neighbours_are_uncorrelated_and_there_is_no_stride() -> None:
    size, count = 10**9, 50_000
    images = permute(np.arange(count), np.array(size), np.array(3, np.uint64))
    noise = 4 / math.sqrt(count)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < noise
    assert abs(np.corrcoef(images, np.arange(count))[0, 1]) < noise
    assert len(np.unique(np.diff(images))) > 0.999 * count
    counts, _ = np.histogram(images, bins=100, range=(0, size))
    assert ((counts - count / 100) ** 2 / (count / 100)).sum() < 160  # chi-square with 99 degrees of freedom


@given(weights=weights_strategy)
def test_counts_are_the_largest_remainder(weights: list[float]) -> None:
    counts = samples_per_block(weights).tolist()
    shares = [Fraction(weight) / sum(map(Fraction, weights)) * BLOCK_SAMPLES for weight in weights]
    assert sum(counts) == BLOCK_SAMPLES
    assert min(counts) >= 1
    if min(shares) >= 1:
        assert all(abs(count - share) < 1 for count, share in zip(counts, shares, strict=True))
        rounded_up = [float(share % 1) for count, share in zip(counts, shares, strict=True) if count > share]
        rounded_down = [float(share % 1) for count, share in zip(counts, shares, strict=True) if count < share]
        assert min(rounded_up, default=1) >= max(rounded_down, default=0) - 1e-9


def test_tiny_weights_get_one_sample() -> None:
    assert samples_per_block([1.0, 1e-9, 1e-300]).tolist() == [4094, 1, 1]
    assert samples_per_block([1e308] * 2).tolist() == [2048, 2048]
    assert samples_per_block([1.0] * 4096).tolist() == [1] * 4096
    assert samples_per_block([1e6] + [1.0] * 4095).tolist() == [1] * 4096


@pytest.mark.parametrize("weights", [[], [1.0] * 4097, [0.0], [1.0, -1.0], [math.nan], [math.inf]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(DataError):
        SampleOrder([10] * len(weights), weights, seed=0)


@settings(max_examples=25, deadline=None)
@given(weights=weights_strategy, seed=seeds, block=st.integers(0, 10**12))
def test_every_block_has_exact_proportions(weights: list[float], seed: int, block: int) -> None:
    order = SampleOrder([100] * len(weights), weights, seed)
    samples = block * BLOCK_SAMPLES + np.arange(BLOCK_SAMPLES)
    counts = np.bincount(order.locate(samples).source, minlength=len(weights))
    assert counts.tolist() == order.counts().tolist()


@settings(max_examples=25, deadline=None)
@given(
    num_windows=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    data=st.data(),
    seed=seeds,
)
def test_every_window_once_an_epoch_and_epochs_in_turn(num_windows: list[int], data, seed: int) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(num_windows), max_size=len(num_windows)))
    order = SampleOrder(num_windows, weights, seed)
    located = locate_all(order, 3 * BLOCK_SAMPLES)
    for source, windows in enumerate(num_windows):
        seen = [(epoch, window) for place, epoch, window in located if place == source]
        for rank, (epoch, _) in enumerate(seen):
            assert epoch == rank // windows
        for start in range(0, len(seen), windows):
            epoch_windows = [window for _, window in seen[start : start + windows]]
            assert len(set(epoch_windows)) == len(epoch_windows)
            assert max(epoch_windows) < windows
            if len(epoch_windows) == windows:
                assert sorted(epoch_windows) == list(range(windows))


def test_epochs_seeds_and_sources_have_orders_of_their_own() -> None:
    def first_epochs(seed: int) -> list[list[int]]:
        location = SampleOrder([1000, 1000], [1, 1], seed).locate(np.arange(BLOCK_SAMPLES))
        return [
            location.window[(location.source == source) & (location.epoch == epoch)].tolist()
            for source in (0, 1)
            for epoch in (0, 1)
        ]

    orders = [tuple(windows) for seed in (0, 1, 2**32) for windows in first_epochs(seed)]
    assert len(set(orders)) == len(orders) == 12


@settings(max_examples=30, deadline=None)
@given(samples=st.lists(st.integers(0, 3 * BLOCK_SAMPLES - 1), max_size=50))
def test_any_batching_of_the_question_gives_the_same_answer(samples: list[int]) -> None:
    order = SampleOrder([777, 31, 5], [5, 2, 0.01], seed=3)
    everything = order.locate(np.arange(3 * BLOCK_SAMPLES))
    some = order.locate(np.array(samples, np.int64))
    for name in ("source", "epoch", "window"):
        assert getattr(some, name).tolist() == getattr(everything, name)[samples].tolist()


def test_shape_is_kept() -> None:
    order = SampleOrder([777, 31], [5, 2], seed=3)
    samples = np.arange(24).reshape(2, 3, 4)
    location, flat = order.locate(samples), order.locate(samples.reshape(-1))
    assert location.window.shape == location.source.shape == location.epoch.shape == (2, 3, 4)
    assert location.window.reshape(-1).tolist() == flat.window.tolist()


def test_far_into_a_long_run() -> None:
    """Sample 10¹³ of sources with 10⁹ windows: ranks and epochs by hand."""
    order = SampleOrder([10**9, 10**9], [3, 1], seed=0)
    block = 10**13 // BLOCK_SAMPLES
    location = order.locate(block * BLOCK_SAMPLES + np.arange(BLOCK_SAMPLES))
    assert set(location.epoch[location.source == 0].tolist()) == {block * 3072 // 10**9}
    assert set(location.epoch[location.source == 1].tolist()) == {block * 1024 // 10**9}


def test_the_order_does_not_change_between_versions() -> None:
    """A checkpoint is resumed by newer code: these values are a contract."""
    location = SampleOrder([1000, 50], [0.7, 0.3], seed=42).locate(np.array([0, 1, 2, 4095, 4096, 10**9]))
    assert location.source.tolist() == [0, 0, 0, 1, 0, 1]
    assert location.epoch.tolist() == [0, 0, 0, 24, 2, 6000977]
    assert location.window.tolist() == [398, 888, 779, 10, 389, 20]
