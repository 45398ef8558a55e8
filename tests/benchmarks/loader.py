"""Measures the speed of the loader, with a warm page cache: `python tests/benchmarks/loader.py`."""

import tempfile
import time
from pathlib import Path

import numpy as np

from data.indexed import IndexedShardWriter
from data.loader import BatchGeometry, StepLoader
from data.order import SampleOrder
from data.packing import UNMASKED, Packing
from data.source import TokenSource

SHARD_TOKENS = 32_000_000
VOCAB_SIZE = 32_000
MEASURED_TOKENS = 20_000_000
NUM_ROUNDS = 5


def write_shard(folder: Path, document_tokens: int) -> Path:
    """Writes a shard of random tokens in documents of the given average length."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCAB_SIZE, SHARD_TOKENS, dtype=np.uint16)
    ends = np.sort(generator.choice(SHARD_TOKENS, SHARD_TOKENS // document_tokens - 1, replace=False))
    with IndexedShardWriter(folder / f"documents-of-{document_tokens}", np.dtype("<u2")) as writer:
        for document in np.split(tokens, ends):
            writer.add_document(document)
    return writer.prefix


def measure_loader(
    source: TokenSource, seq_len: int, micro_batch_size: int, accumulation: int, packing: Packing
) -> float:
    """Returns the tokens per second of one process."""
    order = SampleOrder([source.num_windows(seq_len)], [1.0], seed=0)
    num_samples = micro_batch_size * accumulation
    geometry = BatchGeometry(num_samples, micro_batch_size, accumulation, world_size=1)
    num_steps = MEASURED_TOKENS // (num_samples * seq_len)
    with StepLoader([source], order, geometry, seq_len, 0, 0, VOCAB_SIZE, packing=packing) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(num_steps):
            next(loader)
        return num_steps * num_samples * seq_len / (time.perf_counter() - start)


def measure_opening() -> float:
    """Returns the seconds to open the order of 10¹² tokens and locate 512 samples far into it."""
    num_windows = [122_070_312, 73_242_188, 48_828_125]  # of 4,096 tokens
    start = time.perf_counter()
    order = SampleOrder(num_windows, [5.0, 3.0, 2.0], seed=1)
    order.locate(np.arange(500_000_000, 500_000_512))
    return time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        sources = {size: TokenSource.open(write_shard(Path(folder), size)) for size in (1_000, 100)}
        columns = [("no masks", 1_000, UNMASKED)]
        columns += [(f"masks, {size} per document", size, Packing(mask_documents=True)) for size in sources]
        print("median M tokens/s".rjust(34), *(name.rjust(24) for name, _, _ in columns))
        print("seq_len micro-batch accumulation".rjust(34))
        for shape in [(1024, 8, 1), (1024, 8, 8), (2048, 8, 1), (4096, 4, 16)]:
            rounds = [
                [measure_loader(sources[size], *shape, packing) for _, size, packing in columns]
                for _ in range(NUM_ROUNDS)
            ]
            rates = np.median(rounds, axis=0) / 1e6
            print("{:>9}{:>12}{:>13}".format(*shape), *(f"{rate:24.1f}" for rate in rates))
    print(f"opening a 10¹²-token order at sample 500,000,000: {measure_opening() * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
