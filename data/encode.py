"""Blocks to token ids: what a worker does."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from data.blocks import Block, ReadOptions
from data.documents import clean_documents
from data.indexed import token_dtype
from data.load_tokenizer import load_tokenizer
from data.readers import read_documents
from data.tokenizer import Tokenizer

_SEGMENT_CHARS = 1 << 15
_LONGEST_SEGMENT_CHARS = 1 << 20
_PASSAGE_CHARS = 1 << 20


class SplitOptions(NamedTuple):
    """Which documents are for validation: a share of them, chosen by a seed."""

    val_fraction: float
    seed: int


class EncodedDocuments(NamedTuple):
    """Documents of a task.

    Attributes:
        tokens: ids of all documents, each with the end-of-document id last: [sum of lengths], of a shard's type.
        lengths: tokens of each document, [num_documents].
        is_val: which are for validation, [num_documents].
        counts: see `read_documents` and `clean_documents`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_val: np.ndarray
    counts: Counter[str]

    def documents(self) -> Iterator[tuple[np.ndarray, bool]]:
        """Ids of each document, and whether it is for validation."""
        stops = [0, *np.cumsum(self.lengths).tolist()]
        for (start, stop), is_val in zip(pairwise(stops), self.is_val.tolist(), strict=True):
            yield self.tokens[start:stop], is_val


class Encoder:
    """A function from blocks to their documents' ids, with a tokenizer of its own."""

    def __init__(self, tokenizer_path: Path, eod_id: int, read: ReadOptions, split: SplitOptions) -> None:
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._eod = np.array([eod_id], self._dtype)
        self._read = read
        self._split = split

    def __call__(self, blocks: list[Block]) -> EncodedDocuments:
        """Read, clean and encode.

        Raises:
            DataError: see `read_documents`.
        """
        counts: Counter[str] = Counter()
        texts = read_documents(blocks, self._read, counts)
        pieces: list[np.ndarray] = []
        lengths: list[int] = []
        is_val: list[bool] = []
        for document in clean_documents(texts, self._split.val_fraction, self._split.seed, counts):
            num_before = len(pieces)
            pieces += [ids.astype(self._dtype) for ids in encode_segments(self._tokenizer, document.text)]
            pieces.append(self._eod)
            lengths.append(sum(map(len, pieces[num_before:])))
            is_val.append(document.is_val)
        tokens = np.concatenate(pieces) if pieces else np.empty(0, self._dtype)
        return EncodedDocuments(tokens, np.array(lengths, np.int64), np.array(is_val, bool), counts)


class Passage(NamedTuple):
    """Text to train a tokenizer on, and an even pseudo-random number below 2⁶⁴ that depends on it alone."""

    number: int
    text: str
    num_bytes: int


class PassageSource:
    """A function from blocks to passages of their training documents."""

    def __init__(self, read: ReadOptions, split: SplitOptions) -> None:
        self._read = read
        self._split = split

    def __call__(self, blocks: list[Block]) -> list[Passage]:
        """Passages in order: documents, or about a megabyte of one, cut at line ends where there are any.

        Raises:
            DataError: see `read_documents`.
        """
        texts = read_documents(blocks, self._read, Counter())
        passages = []
        for document in clean_documents(texts, self._split.val_fraction, self._split.seed, Counter()):
            for text in _passages(document.text) if not document.is_val else ():
                encoded = text.encode()
                # Another seed than the split's, whose small hashes are all validation documents.
                number = xxhash.xxh3_64_intdigest(encoded, self._split.seed + 1)
                passages.append(Passage(number, text, len(encoded)))
        return passages


def _passages(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PASSAGE_CHARS:
        stop = text.rfind("\n", start + 1, start + _PASSAGE_CHARS)
        yield text[start : stop if stop > 0 else start + _PASSAGE_CHARS]
        start = stop + 1 if stop > 0 else start + _PASSAGE_CHARS
    yield text[start:]


def encode_segments(tokenizer: Tokenizer, text: str) -> Iterator[np.ndarray]:
    """Ids of a text, int32 [num_tokens] in segments: a tokenizer's time and memory may grow faster than the text.

    A cut is at a line end or space with visible characters around it, where tokenizers that cut text into words
    cut, too: the ids are those of the text in one piece. A million characters without such a place are cut
    anywhere, which may change the ids around the cut.
    """
    if len(text) <= _SEGMENT_CHARS:
        yield tokenizer.encode_array(text)
        return
    for start, stop in pairwise(_cuts(text)):
        segment = text[start:stop]
        yield tokenizer.encode_array(segment) if start == 0 else _encode_continuation(tokenizer, segment)


def _encode_continuation(tokenizer: Tokenizer, segment: str) -> np.ndarray:
    """Ids of a text that does not begin here: without what a tokenizer puts before the beginning of a text."""
    before = tokenizer.encode_array("\n")
    ids = tokenizer.encode_array("\n" + segment)
    return ids[len(before) :] if np.array_equal(ids[: len(before)], before) else tokenizer.encode_array(segment)


def _cuts(text: str) -> Iterator[int]:
    """0, the places to cut at, and the text's length."""
    cut = 0
    while cut < len(text):
        yield cut
        cut = _next_cut(text, cut)
    yield len(text)


def _next_cut(text: str, start: int) -> int:
    first, last = start + _SEGMENT_CHARS, start + _LONGEST_SEGMENT_CHARS
    if first >= len(text):
        return len(text)
    for stop in (min(first + _SEGMENT_CHARS, last), last):
        for separator, offset in (("\n", 1), (" ", 0)):
            position = text.find(separator, first, stop)
            while position >= 0:
                if text[position - 1].strip() and text[position + 1 : position + 2].strip():
                    return position + offset
                position = text.find(separator, position + 1, stop)
    return min(last, len(text))
