"""Tests of skipped samples against explicit lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.order import Phase, SampleOrder
from data.skips import SkippedSamples

NUM_PLACES = 400
RANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)).map(sorted), max_size=6)


def kept_places(ranges: list[list[int]]) -> list[int]:
    return [place for place in range(NUM_PLACES) if not any(first <= place < stop for first, stop in ranges)]


@given(RANGES)
def test_places_are_those_outside_all_ranges(ranges: list[list[int]]) -> None:
    skipped = SkippedSamples.of(ranges)
    expected = kept_places(ranges)
    assert skipped.places(np.arange(len(expected))).tolist() == expected
    assert SkippedSamples.of(skipped.ranges) == skipped
    for place in (0, 1, 17, 60, 121, NUM_PLACES):
        assert skipped.samples_before(place) == sum(kept < place for kept in expected)
    edges = [edge for both in skipped.ranges for edge in both]
    assert edges == sorted(set(edges))


@given(RANGES, st.integers(0, 250))
def test_adding_a_range_equals_creating_them_with_it(ranges: list[list[int]], num_samples: int) -> None:
    added = SkippedSamples.of(ranges).with_range(10, 10 + num_samples)
    assert added == SkippedSamples.of([*ranges, [10, 10 + num_samples]])


@given(RANGES, st.integers(0, 200))
def test_order_that_skips_samples_equals_the_rest_of_the_order(ranges: list[list[int]], num_samples: int) -> None:
    phases = [Phase(50, (1, 2), (1.0, 2.0)), Phase(90, (0,), (1.0,))]
    whole = SampleOrder([30, 7, 11], [2.0, 1.0], seed=4, later_phases=phases)
    order = whole.skipping(SkippedSamples.of(ranges))
    expected = whole.locate(np.array(kept_places(ranges)[:num_samples], np.int64))
    found = order.locate(np.arange(num_samples))
    for name in ("source", "epoch", "window"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert np.array_equal(order.samples_of_sources(num_samples), np.bincount(expected.source, minlength=3))
    assert whole.skipped == SkippedSamples()
