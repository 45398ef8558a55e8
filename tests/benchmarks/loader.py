"""Speed of the loader, from a warm page cache: `python tests/benchmarks/loader.py`."""

import tempfile
import time
from pathlib import Path

import numpy as np

from data.indexed import IndexedShardWriter
from data.loader import BatchGeometry, StepLoader
from data.order import SampleOrder
from data.source import TokenSource

SHARD_TOKENS = 32_000_000
VOCAB_SIZE = 32_000
MEASURED_TOKENS = 60_000_000


def write_shard(folder: Path) -> Path:
    """One shard of random tokens in documents of 1,000."""
    generator = np.random.default_rng(0)
    with IndexedShardWriter(folder / "shard", np.dtype("<u2")) as writer:
        for _ in range(SHARD_TOKENS // 1_000):
            writer.add_document(generator.integers(0, VOCAB_SIZE, 1_000, dtype=np.uint16))
    return writer.prefix


def measure_loader(source: TokenSource, seq_len: int, micro_batch_size: int, accumulation: int) -> float:
    """Tokens a second of one process."""
    order = SampleOrder([source.num_windows(seq_len)], [1.0], seed=0)
    num_samples = micro_batch_size * accumulation
    geometry = BatchGeometry(num_samples, micro_batch_size, accumulation, world_size=1)
    num_steps = MEASURED_TOKENS // (num_samples * seq_len)
    with StepLoader([source], order, geometry, seq_len, 0, 0, VOCAB_SIZE) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(num_steps):
            next(loader)
        return num_steps * num_samples * seq_len / (time.perf_counter() - start)


def measure_opening() -> float:
    """Seconds to open the order of 10¹² tokens and locate 512 samples far into it."""
    num_windows = [122_070_312, 73_242_188, 48_828_125]  # of 4,096 tokens
    start = time.perf_counter()
    order = SampleOrder(num_windows, [5.0, 3.0, 2.0], seed=1)
    order.locate(np.arange(500_000_000, 500_000_512))
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        source = TokenSource.open(write_shard(Path(folder)))
        print(f"{'seq_len':>8}{'micro-batch':>13}{'accumulation':>14}{'M tokens/s':>12}")
        for seq_len, micro_batch_size, accumulation in [
            (1024, 8, 1),
            (1024, 8, 8),
            (2048, 8, 1),
            (2048, 4, 16),
        ]:
            rate = measure_loader(source, seq_len, micro_batch_size, accumulation)
            print(f"{seq_len:>8}{micro_batch_size:>13}{accumulation:>14}{rate / 1e6:>12.1f}")
    print(f"opening a 10¹²-token order at sample 500,000,000: {measure_opening() * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
