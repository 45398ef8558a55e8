"""The order of the training data: a pure function from sample index to (source, epoch, window).

Nothing has to be built, stored or replayed. A run that resumes at sample 500,000,000 evaluates the function there,
and all ranks evaluate the same function, however many there are.

1. Which source? Samples come in blocks of 4,096. Each block has a fixed number of samples of each source, in
   proportion to the weights, and its own random order:

       sample index    0 ............. 4095 | 4096 ............. 8191 | 8192 ...
       source          A B A A C A B A ...  | B A A A C A A B ...     |            weights 6 : 1.5 : 0.5
       per block       A 3072, B 768, C 256 | A 3072, B 768, C 256    |

2. Which sample of that source? The number of its samples since the start of the run follows from one product:

       rank = block · count + (samples of the same source earlier in the block)

3. Which window? One epoch is one pass over the source's windows, and each epoch has its own random order:

       epoch  = rank // num_windows
       window = permutation(seed, source, epoch)[rank % num_windows]

The mixture may change at any sample. A phase starts a new block there, and continues to count each source where the
earlier phases stopped; how much these have used follows from their lengths, without replaying them:

       sample index    0 ............. 4095 | 4096 ... 4999 | 5000 ............. 9095 | 9096 ...
       phase           0                                    | 1
       per block       A 3072, B 768, C 256 | truncated     | A 2048, D 2048          |

A run may skip ranges of samples (see `data.skips`); all other samples keep their places, and so their windows.

The permutation is computed one point at a time with a small cipher whose domain is the windows: the generalised
Feistel network of Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), section 5, restricted to
exactly n values by their cycle walking, section 4. An index x below n is split into two digits of base w = ⌈√n⌉, and
the rounds add a keyed hash of one digit to the other:

       x = left · w + right           left ──────(+)──── right'
                                                  │ mod w          (left, right) ← (right, left + F(right))
                                      right ──┬── F
                                              └───────── left'

Each round is invertible, so the network permutes 0 … w² - 1. These are at most 2·√n + 1 values more than n. An x that
is mapped to one of them goes through the network again until the result is below n, which must happen, since its
cycle contains x itself.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.errors import DataError
from data.skips import SkippedSamples

BLOCK_SAMPLES = 4096
_NUM_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Purposes of a key; they differ, so that no two uses of one seed share a stream.
_SOURCE_ORDER, _WINDOW_ORDER = 0, 1


@dataclass(frozen=True)
class Location:
    """Where samples are: three int64 arrays of the shape of the sample indices.

    Attributes:
        source: Position in the list of sources.
        epoch: Number of completed passes over that source.
        window: Window of the source, to be read with `TokenSource.read_window`.
    """

    source: np.ndarray
    epoch: np.ndarray
    window: np.ndarray


@dataclass(frozen=True)
class Phase:
    """A mixture of sources from one sample on, until the next phase.

    Attributes:
        first_sample: Index of the phase's first sample.
        sources: Positions in the list of all sources, without repetition.
        weights: Relative share of the samples that each of these sources gets.
    """

    first_sample: int
    sources: Sequence[int]
    weights: Sequence[float]

    def weight_of(self, source: int) -> float:
        """Return the weight of a source, 0 if the phase does not use it."""
        return self.weights[self.sources.index(source)] if source in self.sources else 0.0


class SampleOrder:
    """The order of samples for given sources, weights, seed and later phases.

    Attributes:
        num_sources: Number of sources in all phases together.
        skipped: The skipped samples. Sample indices do not count them, the first samples of phases do.
    """

    def __init__(
        self, num_windows: Sequence[int], weights: Sequence[float], seed: int, later_phases: Sequence[Phase] = ()
    ) -> None:
        """Args:
            num_windows: Number of windows of each source, at least 1.
            weights: Relative share of the samples that each of the first `len(weights)` sources gets from sample 0 on.
            seed: Any integer; only its lowest 64 bits are used.
            later_phases: Phases in strictly ascending order of their first samples. Each costs the layout of one block.

        Raises:
            DataError: If there are no sources or more than 4,096, a weight is not a positive number, or a phase does
                not start after the previous one.
        """
        assert min(num_windows, default=1) >= 1
        phases = [Phase(0, range(len(weights)), weights), *later_phases]
        assert {source for phase in phases for source in phase.sources} == set(range(len(num_windows)))
        self.num_sources = len(num_windows)
        self.skipped = SkippedSamples()
        self._seed = seed
        self._num_windows = np.array(num_windows, np.int64)
        self._mixtures: list[_Mixture] = []
        self._first_samples = np.array([phase.first_sample for phase in phases], np.int64)
        if (np.diff(self._first_samples) <= 0).any():
            raise DataError(f"phases start at samples {self._first_samples.tolist()}; expected ascending numbers")
        used = np.zeros(len(num_windows), np.int64)
        for number, phase in enumerate(phases):
            if number > 0:
                length = phase.first_sample - phases[number - 1].first_sample
                used = used + self._mixtures[-1].samples_of_sources(length)
            self._mixtures.append(_Mixture(phase, number, used, seed))

    def skipping(self, skipped: SkippedSamples) -> "SampleOrder":
        """Return the same order without these samples."""
        other = copy.copy(self)
        other.skipped = skipped
        return other

    def counts(self, phase: int = 0) -> np.ndarray:
        """Return the number of samples of each source in a phase's block of 4,096: int64 [num_sources]."""
        return self._mixtures[phase].counts

    def samples_of_sources(self, num_samples: int) -> np.ndarray:
        """Return how many of the first `num_samples` samples each source gets, exactly: int64 [num_sources]."""
        num_places = int(self.skipped.places(np.array(num_samples - 1))) + 1 if num_samples else 0
        counts = self._samples_before(num_places)
        for first, stop in self.skipped.ranges:
            if first < num_places:
                counts = counts - (self._samples_before(stop) - self._samples_before(first))
        return counts

    def _samples_before(self, num_samples: int) -> np.ndarray:
        """Like `samples_of_sources`, but without skipping."""
        mixture = self._mixtures[int(np.searchsorted(self._first_samples, num_samples, side="right")) - 1]
        return mixture.used + mixture.samples_of_sources(num_samples - mixture.first_sample)

    def locate(self, samples: np.ndarray) -> Location:
        """Evaluate the order at sample indices, an array of any shape with values in any order.

        Takes about 0.1 ms for each block of 4,096 that contains one of the samples, and 1 µs per sample.
        """
        shape = np.shape(samples)
        flat = self.skipped.places(np.asarray(samples, np.int64).reshape(-1))
        source, rank = np.empty_like(flat), np.empty_like(flat)
        phases = np.searchsorted(self._first_samples, flat, side="right") - 1
        for phase in np.unique(phases):
            here = np.flatnonzero(phases == phase)
            source[here], rank[here] = self._mixtures[phase].locate(flat[here])
        epoch, index = np.divmod(rank, self._num_windows[source])
        key = _derive_key(self._seed, _WINDOW_ORDER, source, epoch)
        window = permute(index, self._num_windows[source], key)
        return Location(source.reshape(shape), epoch.reshape(shape), window.reshape(shape))


class _Mixture:
    """The blocks of 4,096 samples of one phase.

    Attributes:
        first_sample: Index of the phase's first sample.
        used: Number of samples of each source in all earlier phases: int64 [num_sources].
        counts: Number of samples of each source in a block: int64 [num_sources].
    """

    def __init__(self, phase: Phase, number: int, used: np.ndarray, seed: int) -> None:
        self.first_sample = phase.first_sample
        self.used = used
        self.counts = np.zeros_like(used)
        self.counts[list(phase.sources)] = samples_per_block(phase.weights)
        self._seed = seed
        # Phase 0 has the same keys as a run without phases.
        self._number = () if number == 0 else (number,)
        # A block before shuffling: source 0 repeated, then source 1, …
        self._sorted_sources = np.repeat(np.arange(len(used)), self.counts)
        starts = np.cumsum(self.counts) - self.counts
        self._sorted_ranks = np.arange(BLOCK_SAMPLES) - np.repeat(starts, self.counts)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, samples of it earlier in the run) for samples of this phase: two int64 [N]."""
        blocks, positions = np.divmod(samples - self.first_sample, BLOCK_SAMPLES)
        source, rank = np.empty_like(blocks), np.empty_like(blocks)
        for block in np.unique(blocks):
            here = blocks == block
            block_sources, block_ranks = self._lay_out_block(int(block))
            source[here] = block_sources[positions[here]]
            rank[here] = block * self.counts[source[here]] + block_ranks[positions[here]]
        return source, self.used[source] + rank

    def samples_of_sources(self, num_samples: int) -> np.ndarray:
        """Return how many of this phase's first `num_samples` samples each source gets: int64 [num_sources]."""
        block, remainder = divmod(num_samples, BLOCK_SAMPLES)
        result = block * self.counts
        if remainder:
            result += np.bincount(self._lay_out_block(block)[0][:remainder], minlength=len(result))
        return result

    def _lay_out_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, samples of it earlier in the block) for each position: two int64 [4096]."""
        block_key = _derive_key(self._seed, _SOURCE_ORDER, block, *self._number)
        keys = _mix(block_key + _count(BLOCK_SAMPLES) * _GOLDEN)
        sources = self._sorted_sources[np.argsort(keys, kind="stable")]
        ranks = np.empty_like(sources)
        # The stable sort lists the positions of source 0 in order, then those of source 1, …
        ranks[np.argsort(sources, kind="stable")] = self._sorted_ranks
        return sources, ranks


def samples_per_block(weights: Sequence[float]) -> np.ndarray:
    """Divide a block of 4,096 samples among sources by the largest-remainder method: int64 [num_sources].

    Each source first gets its exact share rounded down, but at least 1. Then samples are added or removed one at a
    time, each at the source that is furthest from its share.

    Raises:
        DataError: If there are no sources or more than 4,096, or a weight is not a positive number.
    """
    if not 1 <= len(weights) <= BLOCK_SAMPLES:
        raise DataError(f"{len(weights):,} sources; expected 1 to {BLOCK_SAMPLES:,}")
    for position, weight in enumerate(weights):
        if not (weight > 0 and math.isfinite(weight)):
            raise DataError(f"weight {weight} of source {position}: expected a positive number")
    largest = max(weights)
    relative = [weight / largest for weight in weights]  # so that the sum cannot overflow
    shares = np.array(relative) / math.fsum(relative) * BLOCK_SAMPLES
    counts = np.maximum(shares.astype(np.int64), 1)
    while (missing := BLOCK_SAMPLES - counts.sum()) != 0:
        if missing > 0:
            counts[np.argmax(shares - counts)] += 1
        else:
            counts[np.argmax(np.where(counts > 1, counts - shares, -np.inf))] -= 1
    return counts


def permute(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Evaluate keyed permutations elementwise: for each size and key, a bijection of 0 … size - 1.

    Args:
        index: Points, each below its size.
        size: Sizes of the permuted ranges, at least 1 and at most 2⁶².
        key: 64-bit keys. The three arguments are broadcast against each other.

    Returns:
        The images of the points: int64, of the common shape.
    """
    shape = np.broadcast_shapes(np.shape(index), np.shape(size), np.shape(key))
    point, size, key = (
        np.broadcast_to(np.asarray(value).astype(np.uint64), shape).reshape(-1) for value in (index, size, key)
    )
    result = _feistel(point, size, key)
    # Cycle walking: usually no point is left, and each iteration leaves far fewer.
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = _feistel(result[outside], size[outside], key[outside])
    return result.astype(np.int64).reshape(shape)


def _feistel(point: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Evaluate a permutation of 0 … w² - 1 with w = ⌈√size⌉: uint64 [N] in and out."""
    width = _ceil_sqrt(size)
    left, right = point // width, point % width
    for round_key in _derive_key(key[None], np.arange(_NUM_ROUNDS).reshape(-1, 1)):
        # The upper half of the hash times w, shifted right, is below w and needs no division.
        shift = ((_mix(right ^ round_key) >> np.uint64(32)) * width) >> np.uint64(32)
        left, right = right, (left + shift) % width
    return left * width + right


def _ceil_sqrt(size: np.ndarray) -> np.ndarray:
    root = np.sqrt(size.astype(np.float64)).astype(np.uint64)
    # The float root may be off by one in either direction.
    root -= root * root > size
    return root + (root * root < size)


def _derive_key(*parts: int | np.ndarray) -> np.ndarray:
    """Hash a sequence of integers, or of arrays elementwise, to 64 bits: uint64, never a scalar."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        if isinstance(part, int):
            part = np.array([part % 2**64], np.uint64)
        key = _mix((key ^ part.astype(np.uint64)) + _GOLDEN)
    return key


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64, a bijection of 64-bit words (Steele, Lea & Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _count(number: int) -> np.ndarray:
    return np.arange(number, dtype=np.uint64)
