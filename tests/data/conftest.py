"""Fixtures of the data tests: small shards, and one tokenizer for all of them."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedShardWriter
from data.sentencepiece_tokenizer import train_sentencepiece

WriteShard = Callable[..., Path]


@pytest.fixture
def write_shard(tmp_path: Path) -> WriteShard:
    """A function that writes documents (lists of ids) as a shard without a manifest and returns its prefix."""

    def write(name: str, documents: Iterable[Iterable[int]], dtype: str = "<u2") -> Path:
        with IndexedShardWriter(tmp_path / name, np.dtype(dtype)) as writer:
            for document in documents:
                writer.add_document(np.array(list(document), dtype))
        return writer.prefix

    return write


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with 400 pieces, trained on artificial sentences."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece(make_texts(200), path, 400, "unigram")
    return path


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Returns distinct texts of artificial words."""
    generator = np.random.default_rng(seed)
    syllables = ["ka", "lo", "mi", "ne", "ru", "st", "to", "va", "xi", "zu", "qu", "ba"]
    texts = []
    for number in range(count):
        words = ["".join(generator.choice(syllables, 3)) for _ in range(20)]
        texts.append(f"{number} {' '.join(words[:10])}.\n{' '.join(words[10:])}!")
    return texts


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """A hundred documents of two lines."""
    return make_texts(100, seed=1)
