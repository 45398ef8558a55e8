"""The split: by content, in the proportion asked for."""

from collections import Counter
from pathlib import Path

import pytest

from data.documents import CleanDocument, clean_documents
from data.readers import ReadOptions

NUM_DOCUMENTS = 4000


def clean(path: Path, val_fraction: float, seed: int = 0) -> list[CleanDocument]:
    return list(clean_documents([path], ReadOptions("line"), val_fraction, seed, Counter()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"document {number}\n" for number in range(NUM_DOCUMENTS)))
    return path


@pytest.mark.parametrize("val_fraction", [0.0, 0.02, 0.3, 0.9])
def test_share_of_validation_documents(path: Path, val_fraction: float) -> None:
    num_val = sum(document.split == "val" for document in clean(path, val_fraction))
    deviation = (NUM_DOCUMENTS * val_fraction * (1 - val_fraction)) ** 0.5
    assert abs(num_val - NUM_DOCUMENTS * val_fraction) <= 4 * deviation


def test_seed_chooses_and_a_larger_fraction_only_adds(path: Path) -> None:
    def chosen(val_fraction: float, seed: int) -> set[str]:
        return {document.text for document in clean(path, val_fraction, seed) if document.split == "val"}

    assert chosen(0.1, 0) == chosen(0.1, 0)
    assert chosen(0.1, 0) != chosen(0.1, 1)
    assert chosen(0.1, 0) < chosen(0.2, 0)


def test_position_runs_through_all_files(path: Path) -> None:
    documents = clean_documents([path, path], ReadOptions("file"), 0.0, 0, Counter())
    assert [document.end_bytes for document in documents] == [path.stat().st_size, 2 * path.stat().st_size]
