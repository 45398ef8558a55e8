"""`python -m data.prepare`: text to token shards, with a tokenizer that is given or trained on the text.

    OUTPUT/train/   train-00000.bin, train-00000.idx, …, tokenizer.model, manifest.json
    OUTPUT/val/     the same for the validation split

Everything is made in OUTPUT.partial, which takes its final name when it is complete: an OUTPUT that exists is
finished. The result does not depend on the number of workers.
"""

import fcntl
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from data.command_line import ArgumentParser, Progress, run_command
from data.documents import clean_documents
from data.encode import encode_documents
from data.errors import DataError
from data.files import hash_file, sync
from data.indexed import token_dtype
from data.manifest import MANIFEST_NAME, Manifest, pad_vocab_size
from data.readers import DOCUMENT_UNITS, ReadOptions, find_input_files
from data.shards import TOKENIZER_NAME, SplitWriter
from data.source import TokenSource
from data.tokenizer import MODEL_TYPES, Tokenizer, train_sentencepiece

_TRAINING_BYTES = 100_000_000  # text a tokenizer is trained on; more adds little but time and memory


@dataclass(frozen=True)
class Options:
    """What to prepare, and how.

    Attributes:
        inputs: paths, folders and globs.
        output: folder to make.
        tokenizer: a SentencePiece model; None trains one.
        train_tokenizer: "unigram" or "bpe", if one is trained.
        vocab_size: ids of a trained tokenizer.
        read: how files are cut into documents.
        val_fraction: share of the documents that go to the validation split, 0 for none.
        shard_tokens: a shard ends before the document that would take it beyond this.
        seed: of the choice of validation documents.
        num_workers: processes that tokenize.
        overwrite: replace an existing output.
    """

    inputs: list[str]
    output: Path
    tokenizer: Path | None = None
    train_tokenizer: str = "unigram"
    vocab_size: int = 8192
    read: ReadOptions = field(default_factory=ReadOptions)
    val_fraction: float = 0.02
    shard_tokens: int = 1_000_000_000
    seed: int = 0
    num_workers: int = 1
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise DataError(f"--val-fraction {self.val_fraction}: a number from 0 to below 1 expected")
        for flag, value, least in [
            ("--vocab-size", self.vocab_size, 1),
            ("--shard-tokens", self.shard_tokens, 1),
            ("--workers", self.num_workers, 1),
            ("--seed", self.seed, 0),
        ]:
            if value < least:
                raise DataError(f"{flag} {value}: at least {least} expected")

    def recorded(self) -> dict[str, Any]:
        """What the result depends on besides the input, as the manifest keeps it."""
        options: dict[str, Any] = {
            "document_per": self.read.document_per,
            "text_key": self.read.text_key,
            "val_fraction": self.val_fraction,
            "shard_tokens": self.shard_tokens,
            "seed": self.seed,
        }
        if self.tokenizer is not None:
            options["tokenizer_sha256"] = Tokenizer.load(self.tokenizer).sha256
        else:
            options |= {"train_tokenizer": self.train_tokenizer, "vocab_size": self.vocab_size}
        return options


def prepare(options: Options) -> None:
    """Make the output, or find it made already; prints what it does and a summary.

    Raises:
        DataError: an input cannot be read, an option does not fit, or the output exists and is another one.
    """
    start = time.monotonic()
    recorded = options.recorded()
    files = find_input_files(options.inputs)
    input_record = _describe_input(files)
    if _is_made_already(options, recorded, input_record):
        print(f"{options.output} was made from the same input with the same options: nothing to do")
        return
    with _partial_folder(options.output) as folder:
        size = f"{_plural(len(files), 'file')}, {input_record['size_bytes'] / 1e6:,.1f} MB"
        print(f"reading {size}; writing {folder}", flush=True)
        tokenizer = _get_tokenizer(options, files, folder)
        counts: Counter[str] = Counter()
        writers = _write_shards(options, files, tokenizer, folder, counts)
        if "train" not in writers:
            found = f"{counts['documents']:,} found, {counts['empty']:,} of them empty"
            raise DataError(f"no document for training: {found}; --val-fraction {options.val_fraction}")
        for writer in writers.values():
            writer.write_manifest(list(writers), tokenizer, recorded, input_record)
        (folder / TOKENIZER_NAME).unlink(missing_ok=True)  # a trained one; each split has its copy now
        _publish(folder, options.output)
    _print_summary(options, tokenizer, counts, writers, time.monotonic() - start)


def _describe_input(files: list[Path]) -> dict[str, Any]:
    """Number, size and hash of the input; names do not count, formats do, so that a folder may move."""
    total_bytes = _total_bytes(files)
    digest = xxhash.xxh3_128()
    done_bytes = 0
    with Progress("hashing the input", total_bytes) as progress:
        for file in files:
            digest.update(f"{file.suffix.lower()} {hash_file(file)}\n".encode())
            done_bytes += file.stat().st_size
            progress.update(done_bytes)
    return {"num_files": len(files), "size_bytes": total_bytes, "xxh3": digest.hexdigest()}


def _is_made_already(options: Options, recorded: dict[str, Any], input_record: dict[str, Any]) -> bool:
    """Whether the output is there, intact and what is asked for.

    Raises:
        DataError: something else is there and may not be overwritten.
    """
    output = options.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    if not (output / "train" / MANIFEST_NAME).is_file():
        raise DataError(f"--output {output}: exists and was not made by data.prepare; choose another folder")
    try:
        manifest = Manifest.read(output / "train")
        for split in manifest.splits:
            TokenSource.open(output / split)
        difference = _first_difference(manifest, recorded, input_record)
    except DataError as error:
        difference = str(error)
    if difference is None:
        return True
    if options.overwrite:
        return False
    raise DataError(f"--output {output}: {difference}; choose another folder or pass --overwrite")


def _first_difference(manifest: Manifest, recorded: dict[str, Any], input_record: dict[str, Any]) -> str | None:
    for name in sorted(manifest.options.keys() | recorded.keys()):
        then, now = manifest.options.get(name), recorded.get(name)
        if then != now:
            return f"made with {name} = {then}, now {now}"
    if manifest.input != input_record:
        return "made from other input"
    return None


@contextmanager
def _partial_folder(output: Path) -> Iterator[Path]:
    """An empty `OUTPUT.partial` that no other process uses; removed unless it has been published."""
    folder = output.absolute().with_name(output.absolute().name + ".partial")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            # Held by the process: it goes with it, however it ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another process is preparing this output") from None
        for leftover in folder.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _publish(folder: Path, output: Path) -> None:
    """Give the finished folder its name, replacing an older output."""
    sync(folder)
    replaced = folder.with_suffix(".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.replace(replaced)
    folder.replace(output)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _get_tokenizer(options: Options, files: list[Path], folder: Path) -> Tokenizer:
    """The tokenizer given, or one trained on the training split and kept in `folder` for the time being."""
    if options.tokenizer is not None:
        return Tokenizer.load(options.tokenizer)
    print(f"training a {options.train_tokenizer} tokenizer with {options.vocab_size:,} pieces", flush=True)
    path = folder / TOKENIZER_NAME
    train_sentencepiece(_training_texts(options, files), path, options.vocab_size, options.train_tokenizer)
    return Tokenizer.load(path)


def _training_texts(options: Options, files: list[Path]) -> Iterator[str]:
    """Training documents, or an even sample of them if there are more than the trainer needs."""
    total_bytes = _total_bytes(files)
    sampled = min(1.0, _TRAINING_BYTES / max(total_bytes, 1))
    with Progress("reading for the tokenizer", total_bytes) as progress:
        for document in clean_documents(files, options.read, options.val_fraction, options.seed, Counter()):
            progress.update(document.end_bytes)
            # Another seed than the split's, whose small hashes are all validation documents.
            number = xxhash.xxh3_64_intdigest(document.text.encode(), options.seed + 1)
            if document.split == "train" and number < sampled * 2**64:
                yield document.text


def _write_shards(
    options: Options, files: list[Path], tokenizer: Tokenizer, folder: Path, counts: Counter[str]
) -> dict[str, SplitWriter]:
    """Tokenize everything; the writers of the splits that got a document, train first."""
    dtype = token_dtype(tokenizer.vocab_size)
    writers: dict[str, SplitWriter] = {}
    num_tokens = 0
    documents = clean_documents(files, options.read, options.val_fraction, options.seed, counts)
    with Progress("tokenizing", _total_bytes(files)) as progress:
        for document, tokens in encode_documents(documents, tokenizer, options.num_workers):
            split = document.split
            if split not in writers:
                writers[split] = SplitWriter(folder / split, split, dtype, options.shard_tokens)
            writers[split].add_document(tokens)
            num_tokens += len(tokens)
            progress.update(document.end_bytes, f"{num_tokens:,} tokens")
    for writer in writers.values():
        writer.close_shard()
    return {split: writers[split] for split in ("train", "val") if split in writers}


def _total_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _print_summary(
    options: Options,
    tokenizer: Tokenizer,
    counts: Counter[str],
    writers: dict[str, SplitWriter],
    seconds: float,
) -> None:
    num_tokens = sum(writer.num_tokens for writer in writers.values())
    print(f"prepared {options.output} in {seconds:.1f} s")
    for split, writer in writers.items():
        print(
            f"  {options.output / split}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens, "
            f"{_plural(len(writer.prefixes), 'shard')}"
        )
    if options.val_fraction > 0 and "val" not in writers:
        print(
            f"  no document fell into the validation split (--val-fraction {options.val_fraction}); smaller "
            "documents (--document-per) or a larger fraction help"
        )
    print(
        f"  {counts['text_bytes'] / num_tokens:.2f} bytes a token, vocabulary {tokenizer.vocab_size:,} "
        f"(padded to {pad_vocab_size(tokenizer.vocab_size):,})"
    )
    print(f"  skipped {counts['empty']:,} empty documents, dropped {counts['nul']:,} NUL characters", flush=True)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _parse_arguments(arguments: list[str] | None) -> Options:
    parser = ArgumentParser(
        prog="python -m data.prepare",
        description="Turn text and JSONL files into token shards: OUTPUT/train and OUTPUT/val.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, or quoted patterns such as 'a/**/*.txt'",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE.model", help="SentencePiece model; else one is trained")
    parser.add_argument("--train-tokenizer", choices=MODEL_TYPES, help="kind of tokenizer to train (default: unigram)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="pieces of a trained tokenizer (default: 8192)")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="key of the text in a JSONL line (default: %(default)s)"
    )
    parser.add_argument(
        "--document-per",
        choices=DOCUMENT_UNITS,
        default="file",
        help="what is a document in a text file (default: %(default)s)",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.02,
        metavar="F",
        help="share of documents for validation (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=1_000_000_000,
        metavar="N",
        help="most tokens of a shard (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the choice of validation documents (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="tokenizing processes (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    given = parser.parse_args(arguments)
    if given.tokenizer is not None and (given.train_tokenizer or given.vocab_size is not None):
        raise DataError("--tokenizer excludes --train-tokenizer and --vocab-size")
    return Options(
        inputs=given.input,
        output=given.output,
        tokenizer=given.tokenizer,
        train_tokenizer=given.train_tokenizer or "unigram",
        vocab_size=8192 if given.vocab_size is None else given.vocab_size,
        read=ReadOptions(given.document_per, given.text_key),
        val_fraction=given.val_fraction,
        shard_tokens=given.shard_tokens,
        seed=given.seed,
        num_workers=given.workers,
        overwrite=given.overwrite,
    )


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""

    def command() -> int:
        prepare(_parse_arguments(arguments))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
