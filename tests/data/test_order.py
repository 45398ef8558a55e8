"""Tests of the data order against counting and brute force."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.loader import BatchGeometry, derive_accumulation
from data.order import BLOCK_SAMPLES, Phase, SampleOrder, _ceil_sqrt, _Mixture, permute, samples_per_block
from data.skips import SkippedSamples

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
def test_permute_is_injective_on_large_ranges(size: int) -> None:
    points = np.concatenate([np.arange(1000), size - 1 - np.arange(1000), np.arange(1000) * (size // 1000)])
    points = np.unique(points)
    images = permute(points, np.array(size), np.array(7, np.uint64))
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(points)


@pytest.mark.parametrize("root", [1, 2, 3, 1000, 2**26 + 1, 2**27, 2**31 - 1, 2**31])
def test_integer_root_is_exact_beyond_float_precision(root: int) -> None:
    sizes = [size for size in (root**2 - 1, root**2, root**2 + 1) if size >= 1]
    expected = [math.isqrt(size - 1) + 1 for size in sizes]
    assert _ceil_sqrt(np.array(sizes, np.uint64)).tolist() == expected


def test_permute_is_elementwise() -> None:
    sizes = np.array([5, 17, 1000, 5])
    keys = np.array([1, 2, 3, 4], np.uint64)
    together = permute(np.full(4, 3), sizes, keys)
    apart = [permute(np.array(3), size, key).item() for size, key in zip(sizes, keys, strict=True)]
    assert together.tolist() == apart


def test_all_permutations_of_four_are_about_equally_likely() -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, (24_000, 1), dtype=np.uint64)
    counts = Counter(map(tuple, permute(np.arange(4), np.array(4), keys).tolist()))
    assert len(counts) == math.factorial(4)
    assert max(counts.values()) < 1_200  # 1,000 expected, standard deviation 31
    assert min(counts.values()) > 800


def test_neighbours_are_uncorrelated_and_differences_vary() -> None:
    size, count = 10**9, 50_000
    images = permute(np.arange(count), np.array(size), np.array(3, np.uint64))
    noise = 4 / math.sqrt(count)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < noise
    assert abs(np.corrcoef(images, np.arange(count))[0, 1]) < noise
    assert len(np.unique(np.diff(images))) > 0.999 * count
    counts, _ = np.histogram(images, bins=100, range=(0, size))
    assert ((counts - count / 100) ** 2 / (count / 100)).sum() < 160  # chi-square with 99 degrees of freedom


@given(weights=weights_strategy)
def test_counts_follow_the_largest_remainder_method(weights: list[float]) -> None:
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
def test_invalid_weights_are_an_error(weights: list[float]) -> None:
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
def test_every_epoch_has_each_window_once_and_epochs_follow_in_order(num_windows: list[int], data, seed: int) -> None:
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


def test_order_differs_between_epochs_seeds_and_sources() -> None:
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
def test_located_samples_do_not_depend_on_the_batching(samples: list[int]) -> None:
    order = SampleOrder([777, 31, 5], [5, 2, 0.01], seed=3)
    everything = order.locate(np.arange(3 * BLOCK_SAMPLES))
    some = order.locate(np.array(samples, np.int64))
    for name in ("source", "epoch", "window"):
        assert getattr(some, name).tolist() == getattr(everything, name)[samples].tolist()


def test_locate_keeps_the_shape() -> None:
    order = SampleOrder([777, 31], [5, 2], seed=3)
    samples = np.arange(24).reshape(2, 3, 4)
    location, flat = order.locate(samples), order.locate(samples.reshape(-1))
    assert location.window.shape == location.source.shape == location.epoch.shape == (2, 3, 4)
    assert location.window.reshape(-1).tolist() == flat.window.tolist()


def test_epochs_are_correct_far_into_a_long_run() -> None:
    """At sample 10¹³ of sources with 10⁹ windows, against epochs computed by hand."""
    order = SampleOrder([10**9, 10**9], [3, 1], seed=0)
    block = 10**13 // BLOCK_SAMPLES
    location = order.locate(block * BLOCK_SAMPLES + np.arange(BLOCK_SAMPLES))
    assert set(location.epoch[location.source == 0].tolist()) == {block * 3072 // 10**9}
    assert set(location.epoch[location.source == 1].tolist()) == {block * 1024 // 10**9}


def test_the_order_does_not_change_between_versions() -> None:
    """Checkpoints are resumed by newer versions, so these values must never change."""
    location = SampleOrder([1000, 50], [0.7, 0.3], seed=42).locate(np.array([0, 1, 2, 4095, 4096, 10**9]))
    assert location.source.tolist() == [0, 0, 0, 1, 0, 1]
    assert location.epoch.tolist() == [0, 0, 0, 24, 2, 6000977]
    assert location.window.tolist() == [398, 888, 779, 10, 389, 20]


@settings(max_examples=25, deadline=None)
@given(
    weights=weights_strategy,
    seed=seeds,
    first_sample=st.integers(0, 10**13),
    num_samples=st.integers(2000, 3 * BLOCK_SAMPLES),
)
def test_proportions_hold_in_any_range_of_a_few_thousand_samples(
    weights: list[float], seed: int, first_sample: int, num_samples: int
) -> None:
    """Whole blocks are exact; in the partial blocks at both ends, counts vary as in sampling without replacement."""
    order = SampleOrder([100] * len(weights), weights, seed)
    samples = first_sample + np.arange(num_samples)
    counts = np.bincount(order.locate(samples).source, minlength=len(weights))
    shares = order.counts() / BLOCK_SAMPLES
    assert np.abs(shares - np.array(weights) / sum(weights)).max() <= 1 / BLOCK_SAMPLES * len(weights)
    variance = 2 * BLOCK_SAMPLES / 4 * shares * (1 - shares)  # two blocks, in the worst case each split in the middle
    assert (np.abs(counts - num_samples * shares) <= 6 * np.sqrt(variance) + 1).all()
    assert (
        order.samples_of_sources(first_sample + num_samples) - order.samples_of_sources(first_sample) == counts
    ).all()


@st.composite
def phased_orders(draw: st.DrawFn) -> tuple[list[int], list[Phase], int]:
    """Draws (windows of each source, all phases, seed), with several short phases in one block."""
    num_windows = draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    sources = range(len(num_windows))
    num_first = draw(st.integers(1, len(num_windows)))
    chosen = [tuple(range(num_first))]
    chosen += draw(st.lists(st.lists(st.sampled_from(sources), min_size=1, unique=True), max_size=3))
    chosen.append(tuple(sources))  # so that each source is used
    starts = draw(
        st.lists(st.integers(1, 9000), min_size=len(chosen) - 1, max_size=len(chosen) - 1, unique=True).map(sorted)
    )
    phases = []
    for start, members in zip([0, *starts], chosen, strict=True):
        weights = draw(st.lists(st.floats(0.1, 10), min_size=len(members), max_size=len(members)))
        phases.append(Phase(start, tuple(members), tuple(weights)))
    return num_windows, phases, draw(seeds)


def make_phased(num_windows: list[int], phases: list[Phase], seed: int) -> SampleOrder:
    return SampleOrder(num_windows, phases[0].weights, seed, phases[1:])


@settings(max_examples=25, deadline=None)
@given(case=phased_orders())
def test_phases_continue_every_source(case: tuple[list[int], list[Phase], int]) -> None:
    """Counted over all phases, each source goes through its epochs as if the mixture had not changed."""
    num_windows, phases, _ = case
    order = make_phased(*case)
    num_samples = phases[-1].first_sample + BLOCK_SAMPLES + 77
    located = locate_all(order, num_samples)
    ranks: Counter[int] = Counter()
    for source, epoch, _ in located:
        assert epoch == ranks[source] // num_windows[source]
        ranks[source] += 1
    assert order.samples_of_sources(num_samples).tolist() == [ranks[source] for source in range(len(num_windows))]
    for source, size in enumerate(num_windows):
        seen = [window for place, _, window in located if place == source]
        for start in range(0, len(seen) - size + 1, size):
            assert sorted(seen[start : start + size]) == list(range(size))
    for number, phase in enumerate(phases):
        stop = phases[number + 1].first_sample if number + 1 < len(phases) else num_samples
        for start in range(phase.first_sample, stop - BLOCK_SAMPLES + 1, BLOCK_SAMPLES):
            counts = Counter(source for source, _, _ in located[start : start + BLOCK_SAMPLES])
            expected_counts = dict(zip(phase.sources, samples_per_block(phase.weights).tolist(), strict=True))
            assert counts == expected_counts


@settings(max_examples=25, deadline=None)
@given(case=phased_orders())
def test_later_phase_does_not_change_earlier_samples(case: tuple[list[int], list[Phase], int]) -> None:
    num_windows, phases, seed = case
    order = make_phased(*case)
    for count in range(1, len(phases)):
        used = {source for phase in phases[:count] for source in phase.sources}
        if used != set(range(len(used))):
            continue  # in a shorter list, the sources would have other positions
        shorter = make_phased(num_windows[: len(used)], phases[:count], seed)
        num_samples = phases[count].first_sample
        assert locate_all(shorter, num_samples) == locate_all(order, num_samples)


def test_the_order_of_phases_does_not_change_between_versions() -> None:
    phases = [Phase(5000, (2, 0), (1.0, 3.0)), Phase(10**10, (1,), (1.0,))]
    order = SampleOrder([1000, 50, 10**9], [0.7, 0.3], 42, phases)
    location = order.locate(np.array([4999, 5000, 5001, 10**9, 10**10 - 1, 10**10]))
    assert location.source.tolist() == [1, 0, 0, 0, 2, 1]
    assert location.epoch.tolist() == [29, 3, 3, 749999, 2, 29]
    assert location.window.tolist() == [37, 7, 45, 613, 235623917, 41]


@pytest.mark.parametrize("starts", [(5, 5), (7, 3), (0, 1)])
def test_phases_out_of_order_are_an_error(starts: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="expected ascending numbers"):
        SampleOrder([10], [1.0], 0, [Phase(start, (0,), (1.0,)) for start in starts])


def test_resuming_anywhere_costs_one_block_per_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of blocks that are laid out is the same at sample 10¹² as at sample 0."""
    blocks: list[int] = []
    lay_out = _Mixture._lay_out_block
    monkeypatch.setattr(_Mixture, "_lay_out_block", lambda self, block: (blocks.append(block), lay_out(self, block))[1])
    phases = [Phase(number * 10**11 + 123, (0, 1), (1.0, number)) for number in range(1, 6)]
    for first_sample in (0, 4096 * 17, 10**12):
        blocks.clear()
        order = SampleOrder([10**9, 10**6], [1.0, 1.0], 0, phases)
        order.locate(np.array([first_sample]))
        assert len(blocks) == len(phases) + 1


NUM_RANKS = 1024
TRILLION_WINDOWS = [122_070_312, 73_242_188, 48_828_125]  # 10¹² tokens in windows of 4,096


def samples_by_rank(geometry: BatchGeometry, step: int) -> list[list[int]]:
    """Returns the samples of each rank in a step."""
    result = []
    for rank in range(geometry.world_size):
        slots = geometry.slots(rank).reshape(-1)
        result.append((step * geometry.samples_per_step + slots[slots < geometry.samples_per_step]).tolist())
    return result


@pytest.mark.parametrize(("samples_per_step", "micro_batch_size"), [(4096, 2), (1500, 1), (5000, 3)])
@pytest.mark.parametrize("step", [0, 1, 10**5, 3 * 10**7])
def test_ranks_partition_each_step_at_a_thousand_ranks_and_a_trillion_tokens(
    samples_per_step: int, micro_batch_size: int, step: int
) -> None:
    """At 10¹² tokens, the ranks read disjoint samples that together make up the step.

    Some ranks have fewer samples than others if the number of ranks does not divide the step.
    """
    accumulation = derive_accumulation(samples_per_step, micro_batch_size, NUM_RANKS)
    geometry = BatchGeometry(samples_per_step, micro_batch_size, accumulation, NUM_RANKS)
    by_rank = samples_by_rank(geometry, step)
    samples = [sample for rank_samples in by_rank for sample in rank_samples]
    assert sorted(samples) == list(range(step * samples_per_step, (step + 1) * samples_per_step))
    assert len({tuple(rank_samples) for rank_samples in by_rank if rank_samples}) == len(list(filter(None, by_rank)))
    location = SampleOrder(TRILLION_WINDOWS, [5.0, 3.0, 2.0], seed=1).locate(np.array(samples))
    read = list(zip(location.source.tolist(), location.epoch.tolist(), location.window.tolist(), strict=True))
    assert len(set(read)) == samples_per_step
    for source, size in enumerate(TRILLION_WINDOWS):
        windows = location.window[location.source == source]
        assert windows.min() >= 0 and windows.max() < size


def test_a_thousand_ranks_read_every_window_once_per_epoch() -> None:
    """Over two whole epochs, with a number of windows that 1,024 ranks do not divide."""
    num_windows = 37 * NUM_RANKS + 5
    geometry = BatchGeometry(1500, 1, derive_accumulation(1500, 1, NUM_RANKS), NUM_RANKS)
    order = SampleOrder([num_windows], [1.0], seed=3)
    slots = np.stack([geometry.slots(rank).reshape(-1) for rank in range(NUM_RANKS)])
    num_steps = -(-2 * num_windows // geometry.samples_per_step)
    seen = np.zeros((2, num_windows), np.int64)
    for step in range(num_steps):
        real = slots[slots < geometry.samples_per_step]
        location = order.locate(step * geometry.samples_per_step + real)
        is_counted = location.epoch < 2
        np.add.at(seen, (location.epoch[is_counted], location.window[is_counted]), 1)
    assert (seen == 1).all()


def undo_permutation(image: int, size: int, key: int) -> int:
    """Computes the inverse of `permute` with Python integers, from the last round to the first."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def derive(*parts: int) -> int:
        result = 0
        for part in parts:
            result = mix(((result ^ part) + 0x9E3779B97F4A7C15) % 2**64)
        return result

    width = math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(image, width)
        for number in reversed(range(8)):
            shift = ((mix(left ^ derive(key, number)) >> 32) * width) >> 32
            left, right = (right - shift) % width, left
        image = left * width + right
        if image < size:
            return image


@pytest.mark.parametrize("size", [*TRILLION_WINDOWS, 10**12, 7, 1])
def test_permutation_is_invertible(size: int) -> None:
    points = np.random.default_rng(0).integers(0, size, 300)
    images = permute(points, np.array(size), np.array(99, np.uint64))
    assert [undo_permutation(image, size, 99) for image in images.tolist()] == points.tolist()


@pytest.mark.parametrize("size", [1000, 32_768, 999_983, TRILLION_WINDOWS[0]])
def test_samples_are_uncorrelated_at_any_distance(size: int) -> None:
    """The samples of a rank (every n-th sample) are as random as all samples, and so are two epochs to each other."""
    count = min(size, 60_000)
    points = np.arange(count)
    first, second = (permute(points, np.array(size), np.array(key, np.uint64)) for key in (5, 6))
    noise = 4.5 / math.sqrt(count)
    for lag in (1, 2, 3, 8, 64, 100, 512):
        assert abs(np.corrcoef(first[:-lag], first[lag:])[0, 1]) < noise, lag
    assert abs(np.corrcoef(first, second)[0, 1]) < noise
    assert abs(np.corrcoef(first, points)[0, 1]) < noise
    steps, repeats = np.unique(np.diff(first), return_counts=True)
    # Among random draws, a difference occurs about count / size times.
    assert repeats.max() <= 12 + 2 * count / size
    assert len(steps) > 0.3 * min(count, size)
    longest_run = max(map(len, "".join("01"[int(up)] for up in np.diff(first) > 0).split("0")))
    assert longest_run < 12  # a run of 12 ascents has a probability of 1 in 13! at each place
    parity = np.bincount(first % 7, minlength=7)
    assert (np.abs(parity - count / 7) < 5 * math.sqrt(count / 7)).all()


def brute_force_counts(weights: list[float]) -> list[int]:
    """Largest remainder with at least one sample per source, in exact fractions, one sample at a time."""
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) / total * BLOCK_SAMPLES for weight in weights]
    counts = [max(int(share), 1) for share in shares]
    sources = range(len(weights))
    while sum(counts) < BLOCK_SAMPLES:
        counts[max(sources, key=lambda source: shares[source] - counts[source])] += 1
    while sum(counts) > BLOCK_SAMPLES:
        reducible = [source for source in sources if counts[source] > 1]
        counts[max(reducible, key=lambda source: counts[source] - shares[source])] -= 1
    return counts


@pytest.mark.parametrize(
    "weights",
    [
        [5.0, 3.0, 2.0, *[1e-6] * 50],
        [1e-6, 5.1, 3.2, 2.3, 1e-6],
        [4000.4, 2.01, 1.6, *[1e-4] * 93],  # a source with two samples gives one away
        [*[1.3] * 3000, 40.7, 2.2, *[1e-9] * 9],
        [0.7, 0.2, 0.1],
    ],
    ids=["many", "ends", "two", "thousands", "none"],
)
def test_samples_for_tiny_weights_come_from_the_sources_furthest_above_their_share(weights: list[float]) -> None:
    assert samples_per_block(weights).tolist() == brute_force_counts(weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "0 sources"),
        ([1.0] * 4097, "4,097 sources"),
        ([1.0, -2.0], r"-2\.0.*source 1"),
        ([math.nan], "nan.*source 0"),
    ],
)
def test_errors_name_the_invalid_weight_and_its_source(weights: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        samples_per_block(weights)


@settings(max_examples=30, deadline=None)
@given(
    case=phased_orders(),
    ranges=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)).map(sorted), max_size=4),
    num_samples=st.integers(0, 6000),
)
def test_skipping_removes_places_and_moves_no_other_sample(
    case: tuple[list[int], list[Phase], int], ranges: list[list[int]], num_samples: int
) -> None:
    """Compared with the whole order, from which the places are deleted one by one."""
    order = make_phased(*case)
    skipping = order.skipping(SkippedSamples.of(ranges))
    num_places = num_samples + sum(stop - first for first, stop in ranges)
    kept = [
        located
        for place, located in enumerate(locate_all(order, num_places))
        if not any(first <= place < stop for first, stop in ranges)
    ][:num_samples]
    assert locate_all(skipping, num_samples) == kept
    counts = Counter(source for source, _, _ in kept)
    assert skipping.samples_of_sources(num_samples).tolist() == [counts[source] for source in range(len(case[0]))]
    assert order.skipped.ranges == ()


@pytest.mark.parametrize("num_samples", [0, 100, 101])
def test_counts_are_exact_at_the_edges_of_a_skipped_range(num_samples: int) -> None:
    order = SampleOrder([7, 5], [2.0, 1.0], seed=0)
    skipping = order.skipping(SkippedSamples.of([(100, 150)]))
    places = [place for place in range(200) if not 100 <= place < 150][:num_samples]
    expected = np.bincount(order.locate(np.array(places, np.int64)).source, minlength=2)
    assert skipping.samples_of_sources(num_samples).tolist() == expected.tolist()
    from_zero = order.skipping(SkippedSamples.of([(0, 50)]))
    assert from_zero.samples_of_sources(0).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_samples_of_any_integer_dtype_have_the_same_location(dtype: type) -> None:
    order = SampleOrder([777, 31], [5, 2], seed=3)
    samples = np.array([[0, 255], [7, 100]])
    expected, found = order.locate(samples), order.locate(samples.astype(dtype))
    for name in ("source", "epoch", "window"):
        assert getattr(found, name).dtype == np.int64
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


def test_permute_broadcasts_sizes_and_keys() -> None:
    sizes, keys = np.array([5, 17, 1000]), np.array([[1], [2]], np.uint64)
    images = permute(np.array(3), sizes, keys)
    assert images.tolist() == [[permute(np.array(3), size, key).item() for size in sizes] for key in keys[:, 0]]
    assert permute(np.array(3), sizes, keys[0]).tolist() == images[0].tolist()
    assert permute(np.array(3), sizes, np.array(1, np.uint64)).tolist() == images[0].tolist()


def test_num_sources_counts_and_weights_cover_all_phases() -> None:
    phase = Phase(5000, (2, 0), (1.0, 3.0))
    assert [phase.weight_of(source) for source in range(3)] == [3.0, 0.0, 1.0]
    order = SampleOrder([10, 20, 30], [1.0, 1.0], 0, [phase])
    assert order.num_sources == 3
    assert order.counts(1).tolist() == [3072, 0, 1024]
