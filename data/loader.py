"""Batches for one rank: which samples it reads in each step, a loader that reads ahead, and the validation set.

Shapes: B rows of a micro-batch, T tokens of a sequence, A micro-batches of a step (the accumulation).

A step takes the next G samples of the order. They fill the slots of one micro-batch after the other, each of them
spread over the ranks. Slots that remain at the end are padding, whose targets are ignored:

    G = 10, 2 ranks, B = 2, A = 3       rank 0      rank 1
                        micro-batch 0   s0 s1       s2 s3
                        micro-batch 1   s4 s5       s6 s7
                        micro-batch 2   s8 s9       -- --

So a step consists of the same samples for any number of ranks and any micro-batch size.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import numpy as np
import torch
import xxhash
from torch import Tensor

from data.errors import DataError
from data.order import SampleOrder
from data.packing import IGNORE, UNMASKED, Packing, document_positions, drop_targets
from data.source import TokenSource

_SAMPLES_PER_LOCATE = 256  # samples that are located in one call, which costs as much for 1 as for 256


@dataclass(frozen=True)
class BatchGeometry:
    """How a step's samples are laid out over ranks and micro-batches.

    Attributes:
        samples_per_step: G, the global batch in samples.
        micro_batch_size: B, rows that a rank runs at once.
        accumulation: A, micro-batches of a rank in a step.
        world_size: Number of ranks.

    Raises:
        DataError: If a number is below 1, or there are fewer slots than samples.
    """

    samples_per_step: int
    micro_batch_size: int
    accumulation: int
    world_size: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise DataError(f"{name} is {value}; expected at least 1")
        if self.slots_per_step < self.samples_per_step:
            raise DataError(
                f"a step of {self.samples_per_step:,} samples does not fit into {self.slots_per_step:,} rows: "
                f"{self.world_size:,} ranks x {self.accumulation:,} micro-batches x {self.micro_batch_size:,}"
            )

    @property
    def slots_per_step(self) -> int:
        """Rows that all ranks together run in a step, including padding."""
        return self.world_size * self.micro_batch_size * self.accumulation

    def slots(self, rank: int) -> np.ndarray:
        """Return the slots of a rank, int64 [A, B], ascending: (a · world_size + rank) · micro_batch_size + b.

        Slot s holds sample s of the step; slots from `samples_per_step` on are padding.
        """
        assert 0 <= rank < self.world_size
        micro_step = np.arange(self.accumulation).reshape(-1, 1)
        row = np.arange(self.micro_batch_size)
        return (micro_step * self.world_size + rank) * self.micro_batch_size + row


def derive_accumulation(samples_per_step: int, micro_batch_size: int, world_size: int) -> int:
    """Return the number of micro-batches per rank that a step needs: ⌈G / (world_size · micro_batch_size)⌉."""
    return -(-samples_per_step // (micro_batch_size * world_size))


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank.

    Attributes:
        tokens: Token ids: int64 [B, T].
        targets: The token after each: int64 [B, T]; `IGNORE` where it is no target, and in all rows of padding.
        positions: The position of each token in its document (see `data.packing`): int32 [B, T]; None if documents are
            not masked. Each row of padding counts as one document.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None

    def pin_memory(self) -> "MicroBatch":
        """Return a copy in page-locked memory, which can be copied to a GPU asynchronously."""
        positions = None if self.positions is None else self.positions.pin_memory()
        return MicroBatch(self.tokens.pin_memory(), self.targets.pin_memory(), positions)


@dataclass(frozen=True)
class StepBatch:
    """The batches of one rank in one step.

    Attributes:
        micro_batches: A micro-batches.
        first_sample: Index of the first sample of the step over all ranks.
        num_targets: Number of targets on this rank that are not `IGNORE`.
    """

    micro_batches: list[MicroBatch]
    first_sample: int
    num_targets: int

    def digest(self) -> str:
        """Return a hex xxh3-64 hash of tokens, targets and positions, to compare the batches of two runs."""
        digest = xxhash.xxh3_64()
        for batch in self.micro_batches:
            for tensor in (batch.tokens, batch.targets, batch.positions):
                if tensor is not None:
                    digest.update(tensor.numpy().data)
        return digest.hexdigest()


class StepLoader:
    """Endless iterator over the steps of one rank, which a thread reads ahead.

    The next step depends on `first_sample` alone, so nothing else has to be saved to resume. Use it as a context
    manager, or call `close`.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        order: SampleOrder,
        geometry: BatchGeometry,
        seq_len: int,
        rank: int,
        first_sample: int,
        vocab_size: int,
        prefetch_steps: int = 2,
        pin_for: torch.device | None = None,
        packing: Packing = UNMASKED,
    ) -> None:
        """Args:
        sources: The sources that `order` refers to by position.
        order: The data order.
        geometry: The layout of a step.
        seq_len: T, tokens of a sequence.
        rank: Rank of this process, 0 … world_size - 1.
        first_sample: Number of samples consumed before; the first step starts there.
        vocab_size: Number of ids that the model has; any other id in the data is an error.
        prefetch_steps: Number of steps to read ahead, at least 1.
        pin_for: The GPU for which batches are copied to page-locked memory; None for ordinary memory.
        packing: How documents in one window are kept apart.
        """
        assert prefetch_steps >= 1 and first_sample >= 0 and len(sources) == order.num_sources
        self._sources = sources
        self._order = order
        self._samples_per_step = geometry.samples_per_step
        self._slots = geometry.slots(rank)
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._packing = packing
        self._pin_for = pin_for
        self._steps = self._read_steps(first_sample)
        self._pending: deque[Future[StepBatch]] = deque()
        # A new thread's current device is GPU 0, and page-locking memory would create a context there.
        initializer = None if pin_for is None else partial(torch.cuda.set_device, pin_for)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="StepLoader", initializer=initializer)
        for _ in range(prefetch_steps):
            self._submit()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """Return the next step.

        Raises:
            DataError: If a token id is outside the vocabulary; the loader is then closed.
        """
        if not self._pending:
            raise StopIteration  # closed
        try:
            step = self._pending.popleft().result()
        except BaseException:
            self.close()
            raise
        self._submit()
        return step

    def close(self) -> None:
        """Stop reading ahead and wait for the thread to end. Safe to call twice."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> "StepLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self) -> None:
        self._pending.append(self._executor.submit(next, self._steps))

    def _read_steps(self, first_sample: int) -> Iterator[StepBatch]:
        """Yield all steps from `first_sample` on; runs in the thread."""
        slots = self._slots[self._slots < self._samples_per_step]
        num_steps = -(-_SAMPLES_PER_LOCATE // max(len(slots), 1))
        while True:
            first_samples = first_sample + self._samples_per_step * np.arange(num_steps)
            located = self._order.locate(first_samples.reshape(-1, 1) + slots)
            for step, step_first_sample in enumerate(first_samples.tolist()):
                sources = [self._sources[source] for source in located.source[step].tolist()]
                reads = list(zip(sources, located.window[step].tolist(), strict=True))
                micro_batches, num_targets = _read_micro_batches(
                    reads, self._slots.shape, self._seq_len, self._vocab_size, self._packing
                )
                yield StepBatch(micro_batches, step_first_sample, num_targets)
            first_sample += num_steps * self._samples_per_step


def validation_batches(
    source: TokenSource,
    seq_len: int,
    num_samples: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    vocab_size: int,
    packing: Packing = UNMASKED,
) -> Iterator[MicroBatch]:
    """Yield this rank's part of a fixed validation set: evenly spaced windows of a source.

    The set is the same on any number of ranks: `num_samples` windows, or all windows if there are fewer. Every rank
    gets the same number of micro-batches, padded where necessary, so that collectives match.

    Args:
        source: The source to validate on.
        seq_len: T, tokens of a sequence.
        num_samples: Number of windows over all ranks, at least 1.
        micro_batch_size: B, rows of a micro-batch.
        rank: Rank of this process, 0 … world_size - 1.
        world_size: Number of ranks.
        vocab_size: Number of ids that the model has.
        packing: How documents in one window are kept apart.

    Raises:
        DataError: If the source is shorter than one window, or contains an id outside the vocabulary.
    """
    num_windows = source.num_windows(seq_len)
    num_samples = min(num_samples, num_windows)
    accumulation = derive_accumulation(num_samples, micro_batch_size, world_size)
    geometry = BatchGeometry(num_samples, micro_batch_size, accumulation, world_size)
    for slots in geometry.slots(rank):
        windows = slots[slots < num_samples] * num_windows // num_samples
        reads = [(source, window) for window in windows.tolist()]
        yield from _read_micro_batches(reads, (1, micro_batch_size), seq_len, vocab_size, packing)[0]


def _read_micro_batches(
    reads: Sequence[tuple[TokenSource, int]], shape: tuple[int, ...], seq_len: int, vocab_size: int, packing: Packing
) -> tuple[list[MicroBatch], int]:
    """Read windows into the first rows of micro-batches of `shape` = (A, B); the other rows are padding.

    Returns:
        The micro-batches, and the number of targets that are not ignored.
    """
    num_micro_batches, micro_batch_size = shape
    windows = np.zeros((num_micro_batches * micro_batch_size, seq_len + 1), np.int64)
    for row, (source, window) in enumerate(reads):
        source.read_window(window, seq_len, windows[row])
    _check_ids(windows, reads, seq_len, vocab_size)
    tokens = torch.from_numpy(windows[:, :-1].copy()).split(micro_batch_size)
    windows[len(reads) :] = IGNORE
    targets = windows[:, 1:].copy()
    num_targets = len(reads) * seq_len
    positions: Sequence[Tensor | None] = [None] * num_micro_batches
    if packing.needs_documents:
        starts = [source.document_starts(window, seq_len) for source, window in reads]
        starts += [np.empty(0, np.int64)] * (len(windows) - len(reads))
        num_targets -= drop_targets(targets, starts, packing)
        if packing.mask_documents:
            positions = torch.from_numpy(document_positions(starts, seq_len)).split(micro_batch_size)
    parts = zip(tokens, torch.from_numpy(targets).split(micro_batch_size), positions, strict=True)
    return [MicroBatch(*part) for part in parts], num_targets


def _check_ids(windows: np.ndarray, reads: Sequence[tuple[TokenSource, int]], seq_len: int, vocab_size: int) -> None:
    if windows.min() >= 0 and windows.max() < vocab_size:
        return
    row, column = np.argwhere((windows < 0) | (windows >= vocab_size))[0].tolist()
    source, window = reads[row]
    raise DataError(
        f"{source.describe_offset(window * seq_len + column)} has id {windows[row, column]:,}; "
        f"expected 0 to {vocab_size - 1:,} for a vocabulary of {vocab_size:,}"
    )
