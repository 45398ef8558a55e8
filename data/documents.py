"""Documents as they will be used: cleaned, counted, and assigned to a split."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from data.errors import DataError
from data.readers import ReadOptions, read_documents


class CleanDocument(NamedTuple):
    """A document that will be used: its text, its split, and the byte of the whole input it ends at."""

    text: str
    split: str
    end_bytes: int


def clean_documents(
    files: Iterable[Path], options: ReadOptions, val_fraction: float, seed: int, counts: Counter[str]
) -> Iterator[CleanDocument]:
    """Documents of files without NUL characters, and without those that are empty or only white space.

    Args:
        files: read one after the other.
        options: how they are cut into documents.
        val_fraction: share of the documents that goes to the split "val"; the others are "train".
        seed: of that choice.
        counts: gets the numbers of "documents", "empty" ones, "nul" characters and "text_bytes".

    Raises:
        DataError: a file cannot be read, or a document is not valid Unicode.
    """
    read_bytes = 0
    for file in files:
        for text, place, end_bytes in read_documents(file, options):
            counts["documents"] += 1
            if "\0" in text:  # debris of broken extraction, never text
                counts["nul"] += text.count("\0")
                text = text.replace("\0", "")
            if not text.strip():
                counts["empty"] += 1
                continue
            try:
                encoded = text.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{place}: character {error.start:,} is half of a surrogate pair") from None
            counts["text_bytes"] += len(encoded)
            # By content, so that a document stays in its split whatever is added to the input.
            is_val = xxhash.xxh3_64_intdigest(encoded, seed) < val_fraction * 2**64
            yield CleanDocument(text, "val" if is_val else "train", read_bytes + end_bytes)
        read_bytes += file.stat().st_size
