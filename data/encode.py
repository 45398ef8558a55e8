"""Turns blocks into token ids, or into passages to train a tokenizer on: the work of a worker process."""

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
_MAX_SEGMENT_CHARS = 1 << 20
_PASSAGE_CHARS = 1 << 20


class SplitOptions(NamedTuple):
    """Which documents go to the validation split: a fraction of them, chosen by a seed."""

    val_fraction: float
    seed: int


class EncodedDocuments(NamedTuple):
    """The encoded documents of a task.

    Attributes:
        tokens: Ids of all documents, each followed by the end-of-document id: [sum of lengths], of the shard's dtype.
        lengths: Number of tokens of each document: int64 [num_documents].
        is_val: Whether each document belongs to the validation split: bool [num_documents].
        counts: See `read_documents` and `clean_documents`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_val: np.ndarray
    counts: Counter[str]

    def documents(self) -> Iterator[tuple[np.ndarray, bool]]:
        """Yield the ids of each document, and whether it belongs to the validation split."""
        stops = [0, *np.cumsum(self.lengths).tolist()]
        for (start, stop), is_val in zip(pairwise(stops), self.is_val.tolist(), strict=True):
            yield self.tokens[start:stop], is_val


class Encoder:
    """A function from blocks to the token ids of their documents, with its own tokenizer."""

    def __init__(self, tokenizer_path: Path, eod_id: int, read: ReadOptions, split: SplitOptions) -> None:
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._eod = np.array([eod_id], self._dtype)
        self._read = read
        self._split = split

    def __call__(self, blocks: list[Block]) -> EncodedDocuments:
        """Read, clean and encode the documents of some blocks.

        Raises:
            DataError: See `read_documents`.
        """
        counts: Counter[str] = Counter()
        texts = read_documents(blocks, self._read, counts)
        segments: list[np.ndarray] = []
        lengths: list[int] = []
        is_val: list[bool] = []
        for document in clean_documents(texts, self._split.val_fraction, self._split.seed, counts):
            num_before = len(segments)
            segments += [ids.astype(self._dtype) for ids in encode_segments(self._tokenizer, document.text)]
            segments.append(self._eod)
            lengths.append(sum(map(len, segments[num_before:])))
            is_val.append(document.is_val)
        tokens = np.concatenate(segments) if segments else np.empty(0, self._dtype)
        return EncodedDocuments(tokens, np.array(lengths, np.int64), np.array(is_val, bool), counts)


class Passage(NamedTuple):
    """Text to train a tokenizer on, and a uniformly distributed 64-bit hash of it."""

    number: int
    text: str
    num_bytes: int


class PassageSource:
    """A function from blocks to passages of their training documents."""

    def __init__(self, read: ReadOptions, split: SplitOptions) -> None:
        self._read = read
        self._split = split

    def __call__(self, blocks: list[Block]) -> list[Passage]:
        """Return the passages in order: whole documents, or parts of about a megabyte, split at line ends if possible.

        Raises:
            DataError: See `read_documents`.
        """
        texts = read_documents(blocks, self._read, Counter())
        passages = []
        for document in clean_documents(texts, self._split.val_fraction, self._split.seed, Counter()):
            for text in _passages(document.text) if not document.is_val else ():
                encoded = text.encode()
                # Not the split's seed: with it, all small hashes would belong to validation documents.
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
    """Encode a text in segments, since a tokenizer's time and memory may grow faster than the text's length.

    Segments end at a line end or space between visible characters, where tokenizers that split text into words split
    it too, so the ids are those of the whole text. A million characters without such a place are split anywhere, which
    may change the ids around the split.

    Returns:
        The ids of each segment: int32 [num_tokens].
    """
    if len(text) <= _SEGMENT_CHARS:
        yield tokenizer.encode_array(text)
        return
    for start, stop in pairwise(_cuts(text)):
        segment = text[start:stop]
        yield tokenizer.encode_array(segment) if start == 0 else _encode_continuation(tokenizer, segment)


def _encode_continuation(tokenizer: Tokenizer, segment: str) -> np.ndarray:
    """Encode a later segment of a text, without what a tokenizer adds at the beginning of a text."""
    before = tokenizer.encode_array("\n")
    ids = tokenizer.encode_array("\n" + segment)
    return ids[len(before) :] if np.array_equal(ids[: len(before)], before) else tokenizer.encode_array(segment)


def _cuts(text: str) -> Iterator[int]:
    """Yield 0, the positions to split at, and the text's length."""
    cut = 0
    while cut < len(text):
        yield cut
        cut = _next_cut(text, cut)
    yield len(text)


def _next_cut(text: str, start: int) -> int:
    first, last = start + _SEGMENT_CHARS, start + _MAX_SEGMENT_CHARS
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
