"""`python -m data.prepare`: turns text into token shards, with a given tokenizer or one trained on the text.

    OUTPUT/train/   train-00000.bin, train-00000.idx, …, tokenizer.model or tokenizer.json, manifest.json
    OUTPUT/val/     the same for the validation split

    sources --blocks.py-->  tasks  --parallel.py, encode.py-->  ids, in order  --shards.py-->  OUTPUT.partial

Everything is written to OUTPUT.partial, which is renamed when it is complete, so an OUTPUT that exists is finished. A
journal in that folder records the point from which a killed preparation can be resumed. The result depends neither on
interruptions nor on the number of workers.
"""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.blocks import FileSource, Position, Source, read_tasks
from data.command_line import Progress, run_command
from data.dataset import DatasetSource
from data.encode import Encoder, Passage, PassageSource
from data.errors import DataError
from data.files import write_file
from data.indexed import token_dtype
from data.inputs import describe_files, find_input_files
from data.journal import Journal
from data.load_tokenizer import load_tokenizer
from data.manifest import pad_vocab_size
from data.options import Options, parse_arguments
from data.output import clear, is_up_to_date, partial_folder, partial_path, publish, resolve_output
from data.parallel import map_tasks
from data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from data.shards import SplitWriter
from data.tokenizer import Tokenizer

_TRAINING_BYTES = 30_000_000  # text to train a tokenizer on; more helps little and needs 25 bytes of memory per byte
_READ_FOR_TRAINING_BYTES = 200 * _TRAINING_BYTES  # input to sample that text from, if there are many files
_SECONDS_BETWEEN_SAVES = 30.0


@dataclass(frozen=True)
class _Input:
    """The input of a preparation.

    Attributes:
        sources: The sources in reading order.
        size_bytes: Total size of the sources, 0 if unknown.
        name: What messages call the input.
        record: Description for the manifest.
        changed_ns: Time of the latest change of a file; 0 for a dataset.
    """

    sources: Sequence[Source]
    size_bytes: int
    name: str
    record: dict[str, Any]
    changed_ns: int = 0


@dataclass
class _Written:
    """The output so far: a writer for each split that has a document, and the counts of the whole input."""

    writers: dict[str, SplitWriter]
    counts: Counter[str]

    @property
    def num_tokens(self) -> int:
        return sum(writer.num_tokens for writer in self.writers.values())

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for writer in self.writers.values():
                writer.release()
            raise


def prepare(options: Options) -> None:
    """Prepare the output unless it exists already, and print progress and a summary.

    Raises:
        DataError: If an input cannot be read, an option is invalid, or the output exists with other options or input.
    """
    start = time.monotonic()
    given = None
    if options.tokenizer is not None:
        given = load_tokenizer(options.tokenizer)
        given.choose_eod_id(options.eod_token)  # raises an error before anything is read
        if given.drops_characters:
            print(f"{given.path} has no token for some characters and no unknown token: these characters are dropped")
    recorded = options.recorded(given)
    output = resolve_output(options.output)
    source = _open_input(options, output)
    if is_up_to_date(output, recorded, source.record, options.overwrite):
        print(f"{options.output} was made from the same input with the same options: nothing to do")
        return
    with partial_folder(output) as folder:
        print(f"reading {source.name}; writing {folder}", flush=True)
        # Includes the time of the last change, since the record covers only samples of large files.
        purpose = {"options": recorded, "input": source.record, "changed_ns": source.changed_ns}
        journal = _find_journal(folder, purpose)
        tokenizer = _get_tokenizer(options, given, source, folder)
        eod_id = tokenizer.choose_eod_id(options.eod_token)
        written = _write_shards(options, source, tokenizer, eod_id, folder, journal)
        if "train" not in written.writers:
            raise DataError(f"no documents for training: {_describe_shortage(written, options)}")
        splits = sorted(written.writers)  # "train" comes before "val"
        for split in splits:
            writer = written.writers[split]
            writer.write_manifest(splits, tokenizer, eod_id, recorded, source.record, written.counts)
        publish(folder, output)
    _print_summary(options, tokenizer, written, splits, time.monotonic() - start)


def _open_input(options: Options, output: Path) -> _Input:
    if options.dataset is not None:
        dataset = DatasetSource(options.dataset)
        record = dataset.describe()
        return _Input([dataset], dataset.size_bytes, f"dataset {options.dataset.name}", record)
    ignored: Counter[str] = Counter()
    files = find_input_files(options.inputs, ignored, (output, partial_path(output)))
    if ignored:
        kinds = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in ignored.most_common(5))
        print(f"ignored {_plural(ignored.total(), 'file')} of other types: {kinds}", flush=True)
    record = describe_files(files)
    name = f"{_plural(len(files), 'file')}, {record['size_bytes'] / 1e6:,.1f} MB"
    changed_ns = max(file.path.stat().st_mtime_ns for file in files)
    return _Input([FileSource(file) for file in files], record["size_bytes"], name, record, changed_ns)


def _find_journal(folder: Path, purpose: dict[str, Any]) -> Journal:
    """Return the journal of an earlier preparation with the same purpose, or a new one after emptying the folder."""
    journal = Journal.read(folder, purpose)
    if journal is None:
        clear(folder)
        return Journal(purpose, Position(), Counter(), {})
    return journal


def _get_tokenizer(options: Options, given: Tokenizer | None, source: _Input, folder: Path) -> Tokenizer:
    """Return the given tokenizer or one trained on the training split, stored in `folder` until the end."""
    if given is not None:
        write_file(folder / given.file_name, given.content)
        return load_tokenizer(folder / given.file_name)
    path = folder / SentencePieceTokenizer.file_name
    if not path.exists():  # if it exists, it belongs to the journal
        passages = _training_passages(options, source)
        print(f"training a {options.train_tokenizer} tokenizer with {options.vocab_size:,} ids", flush=True)
        train_sentencepiece((passage.text for passage in passages), path, options.vocab_size, options.train_tokenizer)
    return load_tokenizer(path)


def _training_passages(options: Options, source: _Input) -> list[Passage]:
    """Return passages of training documents, or a uniform sample of them if there are more than the trainer needs."""
    step = max(1, source.size_bytes // _READ_FOR_TRAINING_BYTES)
    sources = source.sources[::step]
    kept: list[Passage] = []
    limit, num_bytes = 1 << 64, 0
    make_function = partial(PassageSource, options.read, options.split)
    results = map_tasks(make_function, read_tasks(sources, options.read), options.num_workers)
    total_bytes = sum(part.size_bytes for part in sources)
    with Progress("reading for the tokenizer", total_bytes) as progress, closing(results):
        for task, passages in results:
            kept += [passage for passage in passages if passage.number < limit]
            num_bytes += sum(passage.num_bytes for passage in passages if passage.number < limit)
            while num_bytes > _TRAINING_BYTES:
                limit //= 2
                kept = [passage for passage in kept if passage.number < limit]
                num_bytes = sum(passage.num_bytes for passage in kept)
            progress.update(task.end.done_bytes)
    return kept


def _write_shards(
    options: Options, source: _Input, tokenizer: Tokenizer, eod_id: int, folder: Path, journal: Journal
) -> _Written:
    """Tokenize everything after the journal's position and write it to shards."""
    dtype = token_dtype(tokenizer.vocab_size)
    written = _resume(options, dtype, folder, journal)
    before = written.counts["text_bytes"]
    make_function = partial(Encoder, tokenizer.path, eod_id, options.read, options.split)
    tasks = read_tasks(source.sources, options.read, journal.position)
    results = map_tasks(make_function, tasks, options.num_workers)
    last_saved = time.monotonic()
    with (
        Progress("tokenizing", source.size_bytes, journal.position.done_bytes) as progress,
        closing(results),
        written.released_on_error(),
    ):
        for task, encoded in results:
            written.counts.update(encoded.counts)
            for tokens, is_val in encoded.documents():
                split = "val" if is_val else "train"
                if split not in written.writers:
                    written.writers[split] = SplitWriter(folder / split, split, dtype, options.shard_tokens)
                written.writers[split].add_document(tokens)
            text_bytes = written.counts["text_bytes"] - before
            progress.update(task.end.done_bytes, f"{written.num_tokens:,} tokens", text_bytes)
            if time.monotonic() - last_saved >= _SECONDS_BETWEEN_SAVES:
                states = {split: writer.save() for split, writer in written.writers.items()}
                Journal(journal.purpose, task.end, written.counts, states).write(folder)
                last_saved = time.monotonic()
        for writer in written.writers.values():
            writer.close_shard()
    return written


def _resume(options: Options, dtype: np.dtype, folder: Path, journal: Journal) -> _Written:
    """Restore the writers to their state when the journal was written."""
    try:
        writers = {
            split: SplitWriter.resume(folder / split, split, dtype, options.shard_tokens, state)
            for split, state in journal.splits.items()
        }
    except DataError as error:
        raise DataError(f"{error}; remove {folder} to start again") from None
    for child in folder.iterdir():
        if child.is_dir() and child.name not in writers:
            shutil.rmtree(child)
    written = _Written(writers, Counter(journal.counts))
    if journal.position != Position():
        print(f"resuming after {written.counts['documents']:,} documents, {written.num_tokens:,} tokens", flush=True)
    return written


def _describe_shortage(written: _Written, options: Options) -> str:
    num_val = sum(writer.num_documents for writer in written.writers.values())
    counts = [
        (written.counts["empty"], "empty"),
        (written.counts["skipped"], f"skipped (--on-error {options.read.on_error})"),
        (num_val, f"for validation (--val-fraction {options.val_fraction})"),
    ]
    parts = [f"{count:,} {meaning}" for count, meaning in counts if count]
    return ", ".join([f"{written.counts['documents']:,} found", *parts])


def _print_summary(
    options: Options, tokenizer: Tokenizer, written: _Written, splits: list[str], seconds: float
) -> None:
    counts = written.counts
    print(f"prepared {options.output} in {seconds:.1f} s")
    for split in splits:
        writer = written.writers[split]
        print(
            f"  {options.output / split}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens, "
            f"{_plural(len(writer.prefixes), 'shard')}"
        )
    if options.val_fraction > 0 and "val" not in splits:
        print(
            f"  the validation split is empty (--val-fraction {options.val_fraction}); use smaller documents "
            "(--document-per) or a larger fraction"
        )
    print(
        f"  {counts['text_bytes'] / written.num_tokens:.2f} bytes per token, vocabulary {tokenizer.vocab_size:,} "
        f"(padded to {pad_vocab_size(tokenizer.vocab_size):,})"
    )
    print(f"  skipped {counts['empty']:,} empty documents, dropped {counts['nul']:,} NUL characters", flush=True)
    if counts["skipped"] or counts["replaced"]:
        print(
            f"  skipped {counts['skipped']:,} documents that could not be read, replaced {counts['replaced']:,} "
            f"characters (--on-error {options.read.on_error})"
        )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""

    def command() -> int:
        prepare(parse_arguments(arguments))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
