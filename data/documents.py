"""Cleans documents, counts what is dropped, and assigns each document to a split."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash


class CleanDocument(NamedTuple):
    """A cleaned document: its text, and whether it belongs to the validation split."""

    text: str
    is_val: bool


def clean_documents(
    texts: Iterable[str], val_fraction: float, seed: int, counts: Counter[str]
) -> Iterator[CleanDocument]:
    """Remove NUL characters, drop documents that are empty or only white space, and choose a split for the others.

    Args:
        texts: Documents that can be encoded as UTF-8.
        val_fraction: Fraction of the documents that goes to the validation split.
        seed: Seed of that choice.
        counts: Receives the number of "empty" documents, of "nul" characters dropped, and of "text_bytes" kept.
    """
    for text in texts:
        if "\0" in text:  # left over from faulty text extraction
            counts["nul"] += text.count("\0")
            text = text.replace("\0", "")
        if not text or text.isspace():
            counts["empty"] += 1
            continue
        encoded = text.encode()
        counts["text_bytes"] += len(encoded)
        # Depends on the content alone, so that a document stays in its split when other input is added.
        is_val = xxhash.xxh3_64_intdigest(encoded, seed) < val_fraction * 2**64
        yield CleanDocument(text, is_val)
