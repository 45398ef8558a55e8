"""Documents as they will be used: cleaned, counted, and assigned to a split."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash


class CleanDocument(NamedTuple):
    """A document that will be used: its text, and whether it is for validation."""

    text: str
    is_val: bool


def clean_documents(
    texts: Iterable[str], val_fraction: float, seed: int, counts: Counter[str]
) -> Iterator[CleanDocument]:
    """Documents without NUL characters, and without those that are empty or only white space.

    Args:
        texts: documents that can be written as UTF-8.
        val_fraction: share of the documents that is for validation.
        seed: of that choice.
        counts: gets the numbers of "empty" documents, "nul" characters dropped and "text_bytes" left.
    """
    for text in texts:
        if "\0" in text:  # debris of broken extraction, never text
            counts["nul"] += text.count("\0")
            text = text.replace("\0", "")
        if not text or text.isspace():
            counts["empty"] += 1
            continue
        encoded = text.encode()
        counts["text_bytes"] += len(encoded)
        # By content, so that a document stays in its split whatever is added to the input.
        is_val = xxhash.xxh3_64_intdigest(encoded, seed) < val_fraction * 2**64
        yield CleanDocument(text, is_val)
