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
from data.sentencepiece_tokenizer import LEAST_VOCAB_SIZE, MODEL_TYPES
from data.streams import check_encoding
from data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Options:
    """What to prepare, and how.

    Attributes:
        inputs: paths, folders and globs; none if `dataset` is given.
        output: folder to make.
        dataset: what to load instead, by the `datasets` library.
        tokenizer: file or folder of a tokenizer; None trains one.
        eod_token: name of the token that ends a document; None for the tokenizer's own.
        train_tokenizer: "unigram" or "bpe", if one is trained.
        vocab_size: ids of a trained tokenizer.
        read: how inputs are read and cut into documents.
        val_fraction: share of the documents that go to the validation split, 0 for none.
        shard_tokens: a shard ends before the document that would take it beyond this.
        seed: of the choice of validation documents.
        num_workers: processes that tokenize.
        overwrite: replace an existing output.
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
            raise DataError(f"--val-fraction {self.val_fraction}: a number from 0 to below 1 expected")
        for flag, value, least in [
            ("--vocab-size", self.vocab_size, LEAST_VOCAB_SIZE),
            ("--shard-tokens", self.shard_tokens, 1),
            ("--workers", self.num_workers, 1),
            ("--seed", self.seed, 0),
        ]:
            if value < least:
                raise DataError(f"{flag} {value}: at least {least} expected")

    @property
    def split(self) -> SplitOptions:
        """How documents are chosen for validation."""
        return SplitOptions(self.val_fraction, self.seed)

    def recorded(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """What the result depends on besides the input, as the manifest keeps it; `tokenizer` is the one given."""
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
        description="Turn text, JSON, Parquet and Arrow files, or a data set of the `datasets` library, into token "
        "shards: OUTPUT/train and OUTPUT/val. See docs/data.md.",
    )
    _add_input_arguments(parser)
    _add_tokenizer_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")
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
        help="tokenizing processes; the output does not depend on them (default: %(default)s)",
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
        help="instead: what datasets.load_dataset takes (a name of the Hub, a folder, json, text, …), or a folder that "
        "save_to_disk made",
    )
    group.add_argument("--config", metavar="C", help="of the data set")
    group.add_argument("--split", metavar="S", help="of the data set (default: train)")
    group.add_argument("--data-files", nargs="+", metavar="PATH", help="files, for --dataset json and its like")
    group.add_argument("--revision", metavar="R", help="of a data set of the Hub: a commit, tag or branch")
    group.add_argument("--streaming", action="store_true", help="read the data set without storing it first")
    group.add_argument(
        "--text-key", default="text", metavar="KEY", help="key or column of the text (default: %(default)s)"
    )
    group.add_argument(
        "--document-per",
        choices=DOCUMENT_UNITS,
        default="file",
        help="what is a document in a text file; blocks end at blank lines (default: %(default)s)",
    )
    group.add_argument("--encoding", default="utf-8", help="of text and JSON files (default: %(default)s)")
    group.add_argument(
        "--on-error",
        choices=ERROR_POLICIES,
        default="stop",
        help="at bytes that are not text: stop, skip the document, or replace them by U+FFFD; skip also leaves out "
        "records without a text (default: %(default)s)",
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
        "else one is trained",
    )
    group.add_argument(
        "--eod-token", metavar="TOKEN", help="token that ends a document (default: the one the tokenizer has for it)"
    )
    group.add_argument("--train-tokenizer", choices=MODEL_TYPES, help="kind of tokenizer to train (default: unigram)")
    group.add_argument("--vocab-size", type=int, metavar="N", help="pieces of a trained tokenizer (default: 8192)")


def parse_arguments(arguments: Sequence[str] | None) -> Options:
    """The options of a command line.

    Raises:
        DataError: one of them is wrong, or excludes another.
    """
    given = _build_parser().parse_args(arguments)
    if given.tokenizer is not None and (given.train_tokenizer or given.vocab_size is not None):
        raise DataError("--tokenizer excludes --train-tokenizer and --vocab-size")
    if given.tokenizer is None and given.eod_token is not None:
        raise DataError("--eod-token: only with --tokenizer; a trained one has its own")
    dataset = None
    if given.dataset is not None:
        for flag, default in (("document_per", ReadOptions.document_per), ("encoding", ReadOptions.encoding)):
            if getattr(given, flag) != default:
                raise DataError(f"--{flag.replace('_', '-')}: only with --input; a data set's rows are documents")
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
