"""`python -m data.prepare`: text to token shards, with a tokenizer that is given or trained on the text.

    OUTPUT/train/   train-00000.bin, train-00000.idx, …, tokenizer.model or tokenizer.json, manifest.json
    OUTPUT/val/     the same for the validation split

    sources --blocks.py-->  tasks  --parallel.py, encode.py-->  ids, in order  --shards.py-->  OUTPUT.partial

Everything is made in OUTPUT.partial, which takes its final name when it is complete: an OUTPUT that exists is
finished. A journal in there tells where to go on after a kill. The result depends neither on that nor on the number
of workers.
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
from data.output import clear, is_made_already, partial_folder, partial_path, publish, resolve_output
from data.parallel import map_tasks
from data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from data.shards import SplitWriter
from data.tokenizer import Tokenizer

_TRAINING_BYTES = 30_000_000  # text a tokenizer is trained on; more adds little, and takes 25 bytes of memory a byte
_READ_FOR_TRAINING_BYTES = 200 * _TRAINING_BYTES  # of so much, if the input has many files
_SECONDS_BETWEEN_SAVES = 30.0


@dataclass(frozen=True)
class _Input:
    """What is read.

    Attributes:
        sources: in order.
        size_bytes: of all of them, 0 if unknown.
        name: what to call them.
        record: what the manifest keeps of them.
        changed_ns: when a file was changed last; 0 for a data set.
    """

    sources: Sequence[Source]
    size_bytes: int
    name: str
    record: dict[str, Any]
    changed_ns: int = 0


@dataclass
class _Written:
    """What has been made: the writers of the splits that got a document, and the counts of the whole input."""

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
    """Make the output, or find it made already; prints what it does and a summary.

    Raises:
        DataError: an input cannot be read, an option does not fit, or the output exists and is another one.
    """
    start = time.monotonic()
    given = None
    if options.tokenizer is not None:
        given = load_tokenizer(options.tokenizer)
        given.choose_eod_id(options.eod_token)  # or say that it cannot, before anything is read
        if given.drops_characters:
            print(f"{given.path} has no token for some characters, and none for unknown ones: they are left out")
    recorded = options.recorded(given)
    output = resolve_output(options.output)
    source = _open_input(options, output)
    if is_made_already(output, recorded, source.record, options.overwrite):
        print(f"{options.output} was made from the same input with the same options: nothing to do")
        return
    with partial_folder(output) as folder:
        print(f"reading {source.name}; writing {folder}", flush=True)
        # The time too: the record has only samples of large files, and what follows must be of the same files.
        purpose = {"options": recorded, "input": source.record, "changed_ns": source.changed_ns}
        journal = _find_journal(folder, purpose)
        tokenizer = _get_tokenizer(options, given, source, folder)
        eod_id = tokenizer.choose_eod_id(options.eod_token)
        written = _write_shards(options, source, tokenizer, eod_id, folder, journal)
        if "train" not in written.writers:
            raise DataError(f"no document for training: {_describe_shortage(written, options)}")
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
        return _Input([dataset], dataset.size_bytes, f"data set {options.dataset.name}", record)
    left_out: Counter[str] = Counter()
    files = find_input_files(options.inputs, left_out, (output, partial_path(output)))
    if left_out:
        kinds = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in left_out.most_common(5))
        print(f"left out {_plural(left_out.total(), 'file')} of other names: {kinds}", flush=True)
    record = describe_files(files)
    name = f"{_plural(len(files), 'file')}, {record['size_bytes'] / 1e6:,.1f} MB"
    changed_ns = max(file.path.stat().st_mtime_ns for file in files)
    return _Input([FileSource(file) for file in files], record["size_bytes"], name, record, changed_ns)


def _find_journal(folder: Path, purpose: dict[str, Any]) -> Journal:
    """Where an earlier preparation of the same was, or the beginning of a new one in an emptied folder."""
    journal = Journal.read(folder, purpose)
    if journal is None:
        clear(folder)
        return Journal(purpose, Position(), Counter(), {})
    return journal


def _get_tokenizer(options: Options, given: Tokenizer | None, source: _Input, folder: Path) -> Tokenizer:
    """The tokenizer given, or one trained on the training split; kept in `folder` for the time being."""
    if given is not None:
        write_file(folder / given.file_name, given.content)
        return load_tokenizer(folder / given.file_name)
    path = folder / SentencePieceTokenizer.file_name
    if not path.exists():  # else it is that of the journal
        passages = _training_passages(options, source)
        print(f"training a {options.train_tokenizer} tokenizer with {options.vocab_size:,} pieces", flush=True)
        train_sentencepiece((passage.text for passage in passages), path, options.vocab_size, options.train_tokenizer)
    return load_tokenizer(path)


def _training_passages(options: Options, source: _Input) -> list[Passage]:
    """Passages of training documents, or an even sample of them if there are more than the trainer needs."""
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
    """Tokenize everything after the journal's position."""
    dtype = token_dtype(tokenizer.vocab_size)
    written = _go_on(options, dtype, folder, journal)
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


def _go_on(options: Options, dtype: np.dtype, folder: Path, journal: Journal) -> _Written:
    """The writers as they were when the journal was written."""
    try:
        writers = {
            split: SplitWriter.resume(folder / split, split, dtype, options.shard_tokens, state)
            for split, state in journal.splits.items()
        }
    except DataError as error:
        raise DataError(f"{error}; remove {folder} to begin again") from None
    for child in folder.iterdir():
        if child.is_dir() and child.name not in writers:
            shutil.rmtree(child)
    written = _Written(writers, Counter(journal.counts))
    if journal.position != Position():
        print(f"going on after {written.counts['documents']:,} documents, {written.num_tokens:,} tokens", flush=True)
    return written


def _describe_shortage(written: _Written, options: Options) -> str:
    num_val = sum(writer.num_documents for writer in written.writers.values())
    counts = [
        (written.counts["empty"], "of them empty"),
        (written.counts["skipped"], f"left out (--on-error {options.read.on_error})"),
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
            f"  no document fell into the validation split (--val-fraction {options.val_fraction}); smaller "
            "documents (--document-per) or a larger fraction help"
        )
    print(
        f"  {counts['text_bytes'] / written.num_tokens:.2f} bytes a token, vocabulary {tokenizer.vocab_size:,} "
        f"(padded to {pad_vocab_size(tokenizer.vocab_size):,})"
    )
    print(f"  skipped {counts['empty']:,} empty documents, dropped {counts['nul']:,} NUL characters", flush=True)
    if counts["skipped"] or counts["replaced"]:
        print(
            f"  left out {counts['skipped']:,} documents that could not be read, replaced {counts['replaced']:,} "
            f"characters (--on-error {options.read.on_error})"
        )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""

    def command() -> int:
        prepare(parse_arguments(arguments))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
