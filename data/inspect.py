"""`python -m data.inspect`: verifies shards and shows what is in them."""

import sys
from pathlib import Path

import numpy as np

from data.command_line import ArgumentParser, Progress, report_error, run_command
from data.errors import DataError
from data.files import hash_file
from data.indexed import IndexedShard, bin_path
from data.load_tokenizer import load_tokenizer
from data.manifest import MANIFEST_NAME, Manifest
from data.source import TokenSource
from data.tokenizer import Tokenizer

_CHUNK_TOKENS = 1 << 24
_CHUNK_DOCUMENTS = 1 << 20
_SHOWN_TOKENS = 60


def verify_hashes(folder: Path, manifest: Manifest) -> None:
    """Compare every file of a source folder with its manifest.

    Raises:
        DataError: If size or content of a file differs; names the first such file.
    """
    with Progress("hashing", sum(record.size_bytes for record in manifest.files)) as progress:
        done_bytes = 0
        for record in manifest.files:
            path = folder / record.name
            if not path.is_file():
                raise DataError(f"{path}: no such file; the manifest lists it with {record.size_bytes:,} bytes")
            if path.stat().st_size != record.size_bytes:
                raise DataError(f"{path}: {path.stat().st_size:,} bytes found, {record.size_bytes:,} in the manifest")
            found = hash_file(path)
            if found != record.xxh3:
                raise DataError(f"{path}: content has changed: xxh3 is {found}, {record.xxh3} in the manifest")
            done_bytes += record.size_bytes
            progress.update(done_bytes)


def id_range(source: TokenSource) -> tuple[int, int]:
    """Return the smallest and the largest token id, (0, 0) if there are no tokens.

    Raises:
        DataError: If an id is negative, or outside the vocabulary if that is known; names file and token of the first.
    """
    limit = source.manifest.vocab_size if source.manifest is not None else np.iinfo(np.int64).max
    extremes: list[int] = []
    shard_start = 0
    for shard in source.shards:
        for start in range(0, shard.num_tokens, _CHUNK_TOKENS):
            tokens = shard.read(start, min(start + _CHUNK_TOKENS, shard.num_tokens))
            extremes += [int(tokens.min()), int(tokens.max())]
            if min(extremes) < 0 or max(extremes) >= limit:
                wide = tokens.astype(np.int64)
                position = int(np.argmax((wide < 0) | (wide >= limit)))
                place = source.describe_offset(shard_start + start + position)
                raise DataError(f"{place} has id {wide[position]:,}; expected 0 to {limit - 1:,}")
        shard_start += shard.num_tokens
    return min(extremes, default=0), max(extremes, default=0)


def check_document_ends(source: TokenSource, eod_id: int) -> None:
    """Raise DataError, naming file and document, unless every document ends with the end-of-document id."""
    for shard in source.shards:
        tokens = shard.read(0, shard.num_tokens)
        offsets = shard.document_offsets
        for first in range(0, shard.num_documents, _CHUNK_DOCUMENTS):
            starts, stops = offsets[first : first + _CHUNK_DOCUMENTS + 1][:-1], offsets[first + 1 :][:_CHUNK_DOCUMENTS]
            wrong = (stops == starts) | (tokens[np.maximum(stops - 1, 0)] != eod_id)
            if wrong.any():
                document = int(wrong.argmax())
                start, stop = int(starts[document]), int(stops[document])
                found = f"ends with id {tokens[stop - 1]:,}" if stop > start else "is empty"
                raise DataError(
                    f"{bin_path(shard.prefix)}: document {first + document:,} (tokens {start:,} to {stop:,}) {found}; "
                    f"expected the end-of-document id {eod_id:,}"
                )


def length_histogram(source: TokenSource) -> list[tuple[int, int, int]]:
    """Count documents by length, in bins of powers of two without the empty bins at either end.

    Returns:
        (smallest length, largest length, number of documents) of each bin, lengths in tokens.
    """
    counts = np.zeros(64, np.int64)
    for shard in source.shards:
        offsets = shard.document_offsets
        for first in range(0, shard.num_documents, _CHUNK_DOCUMENTS):
            lengths = np.diff(offsets[first : first + _CHUNK_DOCUMENTS + 1])
            # frexp returns the number of binary digits: 0 for 0, 1 for 1, 2 for 2 and 3, …
            counts += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=64)
    used = np.flatnonzero(counts)
    if len(used) == 0:
        return []
    bounds = [(0, 0), *((1 << digits, (2 << digits) - 1) for digits in range(63))]
    return [(*bounds[digits], int(counts[digits])) for digits in range(used[0], used[-1] + 1)]


def find_sources(path: Path) -> list[Path]:
    """Return the source at a path, or all sources one or two folders below it: the splits of one or more outputs."""
    if (path / MANIFEST_NAME).exists() or any(path.glob("*.idx")):
        return [path]
    patterns = [f"{depth}/{name}" for depth in ("*", "*/*") for name in (MANIFEST_NAME, "*.idx")]
    return sorted({found.parent for pattern in patterns for found in path.glob(pattern)}) or [path]


def inspect_source(path: Path, num_samples: int) -> None:
    """Verify one source, and print its counts, the lengths of its documents and the beginnings of a few of them.

    Raises:
        DataError: If the source is damaged or inconsistent; names the place.
    """
    if (path / MANIFEST_NAME).exists():
        verify_hashes(path, Manifest.read(path))
    source = TokenSource.open(path)
    num_documents = sum(shard.num_documents for shard in source.shards)
    if source.manifest is not None and num_documents != source.manifest.num_documents:
        raise DataError(
            f"{path}: {num_documents:,} documents in the shards, {source.manifest.num_documents:,} in the manifest"
        )
    tokenizer = _load_tokenizer(path, source.manifest)
    smallest, largest = id_range(source)
    if source.manifest is not None:
        check_document_ends(source, source.manifest.eod_id)

    print(f"{path}: {num_documents:,} documents, {source.num_tokens:,} tokens, ids {smallest:,} to {largest:,}")
    for shard in source.shards:
        counts = f"{shard.num_documents:,} documents, {shard.num_tokens:,} tokens in {shard.dtype}"
        print(f"  {bin_path(shard.prefix).name}: {counts}")
    if source.manifest is None:
        print("  no manifest: tokenizer, vocabulary and end-of-document id are unknown, hashes were not checked")
    else:
        vocab_size, eod_id = source.manifest.vocab_size, source.manifest.eod_id
        print(f"  vocabulary {vocab_size:,}, end of document {eod_id}; hashes match")
        if source.manifest.counts:
            counts = ", ".join(f"{name} {count:,}" for name, count in source.manifest.counts.items())
            print(f"  counts of the whole input: {counts}")
    _print_histogram(length_histogram(source))
    for number in np.unique(np.linspace(0, num_documents - 1, min(num_samples, num_documents)).astype(int)):
        text = _decode(source.shards, int(number), tokenizer, _SHOWN_TOKENS)
        print(f"  document {number:,}: {text if tokenizer is None else repr(text)}")


def show_document(path: Path, document: int) -> None:
    """Print one whole document: its text if there is a tokenizer, otherwise its ids.

    Args:
        path: A source, or one of its shards.
        document: The document's number in that source or shard, from 0.

    Raises:
        DataError: If there is no such document.
    """
    source = TokenSource.open(path)
    folder = path if path.is_dir() else path.parent
    manifest = Manifest.read(folder) if (folder / MANIFEST_NAME).exists() else None
    num_documents = sum(shard.num_documents for shard in source.shards)
    if not 0 <= document < num_documents:
        raise DataError(f"--document {document}: {path} has documents 0 to {num_documents - 1:,}")
    print(_decode(source.shards, document, _load_tokenizer(folder, manifest)))


def _print_histogram(histogram: list[tuple[int, int, int]]) -> None:
    if not histogram:
        return
    print("  tokens per document:")
    most = max(count for _, _, count in histogram)
    labels = [
        f"{shortest:,} to {longest:,}" if shortest < longest else f"{shortest}" for shortest, longest, _ in histogram
    ]
    width = max(map(len, labels))
    for label, (_, _, count) in zip(labels, histogram, strict=True):
        print(f"    {label:>{width}}  {count:>13,}  {'#' * round(40 * count / most)}".rstrip())


def _load_tokenizer(path: Path, manifest: Manifest | None) -> Tokenizer | None:
    if manifest is None:
        return None
    tokenizer = load_tokenizer(path / manifest.tokenizer_file)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise DataError(f"{tokenizer.path}: sha256 is {tokenizer.sha256}, {manifest.tokenizer_sha256} in the manifest")
    return tokenizer


def _decode(
    shards: list[IndexedShard], document: int, tokenizer: Tokenizer | None, num_tokens: int | None = None
) -> str:
    """Return the first tokens of a document, or all of them: as text if there is a tokenizer, otherwise as ids."""
    for shard in shards:
        if document < shard.num_documents:
            start, stop = shard.document_offsets[document : document + 2].tolist()
            ids = shard.read(start, stop)[:num_tokens].tolist()
            return tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids))
        document -= shard.num_documents
    raise IndexError(document)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""

    def command() -> int:
        parser = ArgumentParser(prog="python -m data.inspect", description="Verify shards and show what is in them.")
        parser.add_argument(
            "path",
            type=Path,
            help="output of data.prepare, one of its splits, a folder of .bin/.idx pairs, one pair without its suffix, "
            "or a folder that contains such folders",
        )
        parser.add_argument("--samples", type=int, default=3, metavar="N", help="documents to show (default: 3)")
        parser.add_argument(
            "--document", type=int, metavar="N", help="only print the whole document N of the source or shard, from 0"
        )
        given = parser.parse_args(arguments)
        if given.document is not None:
            show_document(given.path, given.document)
            return 0
        if given.samples < 0:
            raise DataError(f"--samples {given.samples}: expected 0 or more")
        exit_code = 0
        for path in find_sources(given.path):
            try:
                inspect_source(path, given.samples)
            except DataError as error:
                exit_code = report_error(error)
        return exit_code

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
