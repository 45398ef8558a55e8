"""The options of `python -m data.prepare`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.blocks import DOCUMENT_UNITS, ERROR_POLICIES, NEWLINES, ReadOptions
from data.command_line import ArgumentParser
from data.dataset import DatasetRequest
from data.encode import SplitOptions
from data.errors import DataError
from data.sentencepiece_tokenizer import MIN_VOCAB_SIZE, MODEL_TYPES
from data.streams import check_encoding
from data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Options:
    """What to prepare, and how.

    Attributes:
        inputs: Paths, folders and globs; empty if `dataset` is given.
        output: The folder to create.
        dataset: A dataset to load with the `datasets` library instead of `inputs`.
        tokenizer: File or folder of a tokenizer; None to train one.
        eod_token: Name of the token that ends a document; None for the tokenizer's own.
        train_tokenizer: "unigram" or "bpe", the type of tokenizer to train.
        vocab_size: Number of ids of a trained tokenizer.
        read: How inputs are read and split into documents.
        val_fraction: Fraction of the documents that goes to the validation split, 0 for none.
        shard_tokens: Largest number of tokens in a shard, except that a longer document has a shard of its own.
        seed: Seed of the choice of validation documents.
        num_workers: Number of processes that tokenize.
        overwrite: Whether to replace an existing output.
    """

    inputs: Sequence[str]
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
    dataset: DatasetRequest | None = None
    eod_token: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise DataError(f"--val-fraction {self.val_fraction}: expected at least 0 and less than 1")
        for flag, value, minimum in [
            ("--vocab-size", self.vocab_size, MIN_VOCAB_SIZE),
            ("--shard-tokens", self.shard_tokens, 1),
            ("--workers", self.num_workers, 1),
            ("--seed", self.seed, 0),
        ]:
            if value < minimum:
                raise DataError(f"{flag} {value}: expected at least {minimum}")

    @property
    def split(self) -> SplitOptions:
        """How documents are chosen for validation."""
        return SplitOptions(self.val_fraction, self.seed)

    def recorded(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Return the options that the result depends on, for the manifest; `tokenizer` is the one given, if any."""
        options: dict[str, Any] = {
            "document_per": self.read.document_per,
            "text_key": self.read.text_key,
            "encoding": self.read.encoding,
            "on_error": self.read.on_error,
            "newlines": self.read.newlines,
            "val_fraction": self.val_fraction,
            "shard_tokens": self.shard_tokens,
            "seed": self.seed,
        }
        if self.eod_token is not None:
            options["eod_token"] = self.eod_token
        if tokenizer is not None:
            options["tokenizer_sha256"] = tokenizer.sha256
        else:
            options |= {"train_tokenizer": self.train_tokenizer, "vocab_size": self.vocab_size}
        return options


def _build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m data.prepare",
        description="Turn text, JSON, Parquet and Arrow files, or a dataset of the `datasets` library, into token "
        "shards: OUTPUT/train and OUTPUT/val. See docs/data.md.",
    )
    _add_input_arguments(parser)
    _add_tokenizer_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.02,
        metavar="F",
        help="fraction of the documents for validation (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=1_000_000_000,
        metavar="N",
        help="largest number of tokens in a shard (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of validation documents (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of tokenizing processes; does not change the output (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return parser


def _add_input_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    one = group.add_mutually_exclusive_group(required=True)
    one.add_argument(
        "--input",
        nargs="+",
        default=(),
        metavar="PATH",
        help="files, folders, or quoted patterns such as 'a/**/*.txt'; .txt, .md, .jsonl, .json, .parquet, .arrow, "
        "each also .gz or .zst",
    )
    one.add_argument(
        "--dataset",
        metavar="NAME",
        help="instead of --input: a name that datasets.load_dataset accepts (on the Hub, a folder, json, text, …), or "
        "a folder written by save_to_disk",
    )
    group.add_argument("--config", metavar="C", help="configuration of the dataset")
    group.add_argument("--split", metavar="S", help="split of the dataset (default: train)")
    group.add_argument("--data-files", nargs="+", metavar="PATH", help="files, for --dataset json and the like")
    group.add_argument("--revision", metavar="R", help="commit, tag or branch of a dataset on the Hub")
    group.add_argument("--streaming", action="store_true", help="read the dataset without storing it on disk first")
    group.add_argument(
        "--text-key", default="text", metavar="KEY", help="key or column of the text (default: %(default)s)"
    )
    group.add_argument(
        "--document-per",
        choices=DOCUMENT_UNITS,
        default="file",
        help="what counts as a document in a text file; blocks end at blank lines (default: %(default)s)",
    )
    group.add_argument("--encoding", default="utf-8", help="encoding of text and JSON files (default: %(default)s)")
    group.add_argument(
        "--on-error",
        choices=ERROR_POLICIES,
        default="stop",
        help="what to do about bytes that cannot be decoded: stop, skip the document, or replace them with U+FFFD; "
        "skip also drops records without text (default: %(default)s)",
    )
    group.add_argument(
        "--newlines",
        choices=NEWLINES,
        default="unify",
        help="unify turns \\r\\n and \\r into \\n (default: %(default)s)",
    )


def _add_tokenizer_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="SentencePiece .model, tokenizer.json, GPT-2's vocabulary or merges, or a folder with one of these; "
        "without it, a tokenizer is trained",
    )
    group.add_argument("--eod-token", metavar="TOKEN", help="token that ends a document (default: the tokenizer's own)")
    group.add_argument("--train-tokenizer", choices=MODEL_TYPES, help="type of tokenizer to train (default: unigram)")
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="vocabulary size of a trained tokenizer (default: 8192)"
    )


def parse_arguments(arguments: Sequence[str] | None) -> Options:
    """Parse the options of a command line.

    Raises:
        DataError: If an option is invalid, or cannot be combined with another.
    """
    given = _build_parser().parse_args(arguments)
    if given.tokenizer is not None and (given.train_tokenizer or given.vocab_size is not None):
        raise DataError("--tokenizer cannot be combined with --train-tokenizer or --vocab-size")
    if given.tokenizer is None and given.eod_token is not None:
        raise DataError("--eod-token: only with --tokenizer; a trained tokenizer has its own")
    dataset = None
    if given.dataset is not None:
        for flag, default in (("document_per", ReadOptions.document_per), ("encoding", ReadOptions.encoding)):
            if getattr(given, flag) != default:
                raise DataError(f"--{flag.replace('_', '-')}: only with --input; the rows of a dataset are documents")
        dataset = DatasetRequest(
            name=given.dataset,
            config=given.config,
            split=given.split or "train",
            data_files=tuple(given.data_files or ()),
            revision=given.revision,
            streaming=given.streaming,
        )
    else:
        for flag in ("config", "split", "data_files", "revision", "streaming"):
            if getattr(given, flag):
                raise DataError(f"--{flag.replace('_', '-')}: only with --dataset")
    read = ReadOptions(
        document_per=given.document_per,
        text_key=given.text_key,
        encoding=check_encoding(given.encoding),
        on_error=given.on_error,
        newlines=given.newlines,
    )
    return Options(
        inputs=given.input,
        output=given.output,
        dataset=dataset,
        tokenizer=given.tokenizer,
        eod_token=given.eod_token,
        train_tokenizer=given.train_tokenizer or "unigram",
        vocab_size=8192 if given.vocab_size is None else given.vocab_size,
        read=read,
        val_fraction=given.val_fraction,
        shard_tokens=given.shard_tokens,
        seed=given.seed,
        num_workers=given.workers,
        overwrite=given.overwrite,
    )
