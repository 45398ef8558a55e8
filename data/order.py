"""The order of the training data: a pure function from sample index to (source, epoch, window).

There is nothing to build, store or replay. A run that resumes at sample 500,000,000 evaluates the function
there, and every rank, on any number of ranks, evaluates the same one.

1. Which source? Samples come in blocks of 4,096. A block holds a fixed number of samples of each source, in
   proportion to the weights, in an order of its own:

       sample index    0 ............. 4095 | 4096 ............. 8191 | 8192 ...
       source          A B A A C A B A ...  | B A A A C A A B ...     |            weights 6 : 1.5 : 0.5
       per block       A 3072, B 768, C 256 | A 3072, B 768, C 256    |

2. Which sample of that source? Counting the source's samples from the start of the run takes one product:

       rank = block · count + (samples of the same source that stand earlier in the block)

3. Which window? One epoch is one pass over the source's windows, each epoch in an order of its own:

       epoch  = rank // num_windows
       window = permutation(seed, source, epoch)[rank % num_windows]

The mixture may change at any sample. A phase starts a block of its own there, and goes on counting each source where
the phases before have left it; what they have used up follows from their lengths, block by block, without replaying:

       sample index    0 ............. 4095 | 4096 ... 4999 | 5000 ............. 9095 | 9096 ...
       phase           0                                    | 1
       per block       A 3072, B 768, C 256 | cut short     | A 2048, D 2048          |

A run may leave ranges of samples out (see `data.skips`); all other samples keep their places, and so their windows.

The permutation is computed a point at a time with a small cipher whose domain is the windows: the generalised
Feistel network of Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), section 5, made to
fit exactly with their cycle walking, section 4. An index x below n is split into two digits of base
w = ⌈√n⌉, and the rounds add a keyed hash of one digit to the other:

       x = left · w + right           left ──────(+)──── right'
                                                  │ mod w          (left, right) ← (right, left + F(right))
                                      right ──┬── F
                                              └───────── left'

Each round can be undone, so the network permutes 0 … w² - 1. That is at most 2·√n + 1 more than n values; an
x that lands on one of those goes through the network again until it comes back below n. Following its
cycle, it must: the cycle started below n.
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
# What a key is for. Distinct, so that no two uses of one seed share a stream.
_SOURCE_ORDER, _WINDOW_ORDER = 0, 1


@dataclass(frozen=True)
class Location:
    """Where samples are: three int64 arrays of the shape of the question.

    Attributes:
        source: position in the list of sources.
        epoch: passes over that source already finished, from 0.
        window: window of the source, to be read with `TokenSource.read_window`.
    """

    source: np.ndarray
    epoch: np.ndarray
    window: np.ndarray


@dataclass(frozen=True)
class Phase:
    """A mixture of sources from a sample on, until the next phase.

    Attributes:
        first_sample: index of its first sample.
        sources: positions in the list of all sources, each once.
        weights: share of the samples that each of them gets, in any unit.
    """

    first_sample: int
    sources: Sequence[int]
    weights: Sequence[float]

    def weight_of(self, source: int) -> float:
        """The weight of a source, 0 for one that the phase does not use."""
        return self.weights[self.sources.index(source)] if source in self.sources else 0.0


class SampleOrder:
    """The order for given sources, weights and seed, and for the phases that follow.

    Attributes:
        num_sources: of all phases together.
        skipped: what is left out; samples are counted without it, first samples of phases with it.
    """

    def __init__(
        self, num_windows: Sequence[int], weights: Sequence[float], seed: int, later_phases: Sequence[Phase] = ()
    ) -> None:
        """Args:
            num_windows: windows of each source, at least 1.
            weights: share of the samples that each of the first `len(weights)` sources gets from sample 0 on, in any
                unit.
            seed: any integer; only its lowest 64 bits count.
            later_phases: in the order of their first samples, which differ. Costs the layout of one block each.

        Raises:
            DataError: no source, more than 4,096, a weight that is not a positive number, or a phase that does not
                start after the one before.
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
            raise DataError(f"phases start at samples {self._first_samples.tolist()}; ascending numbers expected")
        used = np.zeros(len(num_windows), np.int64)
        for number, phase in enumerate(phases):
            if number > 0:
                length = phase.first_sample - phases[number - 1].first_sample
                used = used + self._mixtures[-1].samples_of_sources(length)
            self._mixtures.append(_Mixture(phase, number, used, seed))

    def skipping(self, skipped: SkippedSamples) -> "SampleOrder":
        """The same order without these samples."""
        other = copy.copy(self)
        other.skipped = skipped
        return other

    def counts(self, phase: int = 0) -> np.ndarray:
        """Samples of each source in a block of 4,096 of a phase: int64 [num_sources]."""
        return self._mixtures[phase].counts

    def samples_of_sources(self, num_samples: int) -> np.ndarray:
        """How many of the first `num_samples` samples each source gets, exactly: int64 [num_sources]."""
        num_places = int(self.skipped.places(np.array(num_samples - 1))) + 1 if num_samples else 0
        counts = self._samples_before(num_places)
        for first, stop in self.skipped.ranges:
            if first < num_places:
                counts = counts - (self._samples_before(stop) - self._samples_before(first))
        return counts

    def _samples_before(self, num_samples: int) -> np.ndarray:
        """The same with nothing left out."""
        mixture = self._mixtures[int(np.searchsorted(self._first_samples, num_samples, side="right")) - 1]
        return mixture.used + mixture.samples_of_sources(num_samples - mixture.first_sample)

    def locate(self, samples: np.ndarray) -> Location:
        """Evaluate the order at sample indices of any shape, number and sequence.

        Costs about 0.1 ms for each block of 4,096 that the samples touch, and 1 µs a sample.
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
    """A phase's blocks of 4,096 samples.

    Attributes:
        first_sample: where the phase starts.
        used: samples of each source in all phases before: int64 [num_sources].
        counts: samples of each source in a block: int64 [num_sources].
    """

    def __init__(self, phase: Phase, number: int, used: np.ndarray, seed: int) -> None:
        self.first_sample = phase.first_sample
        self.used = used
        self.counts = np.zeros_like(used)
        self.counts[list(phase.sources)] = samples_per_block(phase.weights)
        self._seed = seed
        # Phase 0 has the keys that a run without phases has.
        self._number = () if number == 0 else (number,)
        # A block before it is shuffled: source 0 repeated, then source 1, …
        self._sorted_sources = np.repeat(np.arange(len(used)), self.counts)
        starts = np.cumsum(self.counts) - self.counts
        self._sorted_ranks = np.arange(BLOCK_SAMPLES) - np.repeat(starts, self.counts)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, samples of it earlier in the run) of samples of this phase: two int64 [N]."""
        blocks, positions = np.divmod(samples - self.first_sample, BLOCK_SAMPLES)
        source, rank = np.empty_like(blocks), np.empty_like(blocks)
        for block in np.unique(blocks):
            here = blocks == block
            block_sources, block_ranks = self._lay_out_block(int(block))
            source[here] = block_sources[positions[here]]
            rank[here] = block * self.counts[source[here]] + block_ranks[positions[here]]
        return source, self.used[source] + rank

    def samples_of_sources(self, num_samples: int) -> np.ndarray:
        """How many of this phase's first `num_samples` samples each source gets: int64 [num_sources]."""
        block, remainder = divmod(num_samples, BLOCK_SAMPLES)
        result = block * self.counts
        if remainder:
            result += np.bincount(self._lay_out_block(block)[0][:remainder], minlength=len(result))
        return result

    def _lay_out_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, samples of it earlier in the block) of each position: two int64 [4096]."""
        block_key = _derive_key(self._seed, _SOURCE_ORDER, block, *self._number)
        keys = _mix(block_key + _count(BLOCK_SAMPLES) * _GOLDEN)
        sources = self._sorted_sources[np.argsort(keys, kind="stable")]
        ranks = np.empty_like(sources)
        # A stable sort lists the positions of source 0 in order, then those of source 1, …
        ranks[np.argsort(sources, kind="stable")] = self._sorted_ranks
        return sources, ranks


def samples_per_block(weights: Sequence[float]) -> np.ndarray:
    """Samples of each source in a block of 4,096, by the largest remainder, at least 1: int64 [num_sources].

    Each source first gets the whole part of its exact share (or 1); what is left over or missing is then
    settled one sample at a time with whichever source is furthest from its share.

    Raises:
        DataError: no source, more than 4,096, or a weight that is not a positive number.
    """
    if not 1 <= len(weights) <= BLOCK_SAMPLES:
        raise DataError(f"{len(weights):,} sources; 1 to {BLOCK_SAMPLES:,} expected")
    for position, weight in enumerate(weights):
        if not (weight > 0 and math.isfinite(weight)):
            raise DataError(f"weight {weight} of source {position}: a positive number expected")
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
    """Keyed permutations, evaluated elementwise: for fixed size and key, a bijection of 0 … size - 1.

    Args:
        index: points, each below its size.
        size: sizes of the permuted ranges, at least 1 and at most 2⁶².
        key: 64-bit keys. The three broadcast against each other.

    Returns:
        The images of the points: int64, of the common shape.
    """
    shape = np.broadcast_shapes(np.shape(index), np.shape(size), np.shape(key))
    point, size, key = (
        np.broadcast_to(np.asarray(value).astype(np.uint64), shape).reshape(-1) for value in (index, size, key)
    )
    result = _feistel(point, size, key)
    # Cycle walking: nearly always none are left, and each turn leaves far fewer.
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = _feistel(result[outside], size[outside], key[outside])
    return result.astype(np.int64).reshape(shape)


def _feistel(point: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A permutation of 0 … w² - 1 for w = ⌈√size⌉: uint64 [N] in and out."""
    width = _ceil_sqrt(size)
    left, right = point // width, point % width
    for round_key in _derive_key(key[None], np.arange(_NUM_ROUNDS).reshape(-1, 1)):
        # The hash's upper half times w, shifted, is a number below w: a division saved.
        shift = ((_mix(right ^ round_key) >> np.uint64(32)) * width) >> np.uint64(32)
        left, right = right, (left + shift) % width
    return left * width + right


def _ceil_sqrt(size: np.ndarray) -> np.ndarray:
    root = np.sqrt(size.astype(np.float64)).astype(np.uint64)
    # The float root may be off by one either way.
    root -= root * root > size
    return root + (root * root < size)


def _derive_key(*parts: int | np.ndarray) -> np.ndarray:
    """64-bit hash of a sequence of integers or of arrays of them, elementwise: uint64, never a scalar."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        if isinstance(part, int):
            part = np.array([part % 2**64], np.uint64)
        key = _mix((key ^ part.astype(np.uint64)) + _GOLDEN)
    return key


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, a bijection of 64-bit words (Steele, Lea & Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _count(number: int) -> np.ndarray:
    return np.arange(number, dtype=np.uint64)
