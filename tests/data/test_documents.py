"""Tests of cleaning and of the split, which depends on the content and has the requested proportion."""

from collections import Counter

import pytest

from data.documents import clean_documents

TEXTS = [f"document {number}" for number in range(4000)]


def chosen(val_fraction: float, seed: int = 0) -> set[str]:
    return {text for text, is_val in clean_documents(TEXTS, val_fraction, seed, Counter()) if is_val}


@pytest.mark.parametrize("val_fraction", [0.0, 0.02, 0.3, 0.9])
def test_fraction_of_validation_documents(val_fraction: float) -> None:
    deviation = (len(TEXTS) * val_fraction * (1 - val_fraction)) ** 0.5
    assert abs(len(chosen(val_fraction)) - len(TEXTS) * val_fraction) <= 4 * deviation


def test_validation_documents_depend_on_the_seed_and_grow_with_the_fraction() -> None:
    assert chosen(0.1, 0) == chosen(0.1, 0)
    assert chosen(0.1, 0) != chosen(0.1, 1)
    assert chosen(0.1, 0) < chosen(0.2, 0)


def test_dropped_text_is_counted() -> None:
    counts: Counter[str] = Counter()
    texts = ["one\0 two\0", "", " \n\t\u3000", "\0", "thrée"]
    assert [text for text, _ in clean_documents(texts, 0.0, 0, counts)] == ["one two", "thrée"]
    assert counts == {"empty": 3, "nul": 3, "text_bytes": 13}
