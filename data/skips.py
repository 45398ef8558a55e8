"""Samples of the data order that a run skips.

The order itself does not change, only the place in it that the n-th sample of the run comes from:

       place in the order   0 1 2 3 4 5 6 7 8 9 ...
       skipped                    [3, 6)
       sample of the run    0 1 2       3 4 5 6 ...
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SkippedSamples:
    """Ranges [first, stop) of places in the order, ascending and not adjacent. Create them with `of`."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Sequence[int]]) -> "SkippedSamples":
        """Create them from ranges in any order, which may be adjacent or overlap."""
        merged: list[tuple[int, int]] = []
        for first, stop in sorted((first, stop) for first, stop in ranges):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            elif first < stop:
                merged.append((first, stop))
        return cls(tuple(merged))

    def with_range(self, first: int, stop: int) -> "SkippedSamples":
        """Return these ranges and one more."""
        return self.of([*self.ranges, (first, stop)])

    def samples_before(self, place: int) -> int:
        """Return how many samples of the run come from places before this one."""
        return place - sum(min(stop, place) - first for first, stop in self.ranges if first < place)

    def places(self, samples: np.ndarray) -> np.ndarray:
        """Return the places in the order of samples of the run: int64, of the same shape."""
        samples = np.asarray(samples, np.int64)
        if not self.ranges:
            return samples
        first, stop = np.array(self.ranges, np.int64).T
        skipped = np.cumsum(stop - first)
        # Index of the sample after each range: the places up to its end, minus the skipped ones.
        next_samples = stop - skipped
        return samples + np.append(0, skipped)[np.searchsorted(next_samples, samples, side="right")]
