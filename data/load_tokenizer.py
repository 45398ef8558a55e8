"""Loads a tokenizer from a file or folder, whichever library it belongs to."""

import json
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.tokenizer import Tokenizer

_VOCABULARY_AND_MERGES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a SentencePiece model, a Hugging Face `tokenizer.json`, or GPT-2's vocabulary and merges.

    Args:
        path: A file, or a folder that contains one under its usual name. For a vocabulary and merges, either file of
            the pair `vocab.json` and `merges.txt`, or `encoder.json` and `vocab.bpe`; both must be in the same folder.

    Raises:
        DataError: There is no such file, or it is not a tokenizer.
    """
    # Imported here so that commands which load no tokenizer start fast.
    from data.huggingface_tokenizer import HuggingFaceTokenizer, convert_vocabulary_and_merges
    from data.sentencepiece_tokenizer import SentencePieceTokenizer

    path = _find_file(Path(path))
    content = path.read_bytes()
    if pair := _vocabulary_and_merges(path, content):
        return HuggingFaceTokenizer(path, convert_vocabulary_and_merges(*pair))
    if path.suffix == ".json" or content.lstrip()[:1] == b"{":
        return HuggingFaceTokenizer(path, content)
    return SentencePieceTokenizer(path, content)


def _find_file(path: Path) -> Path:
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model", *(vocabulary for vocabulary, _ in _VOCABULARY_AND_MERGES))
        for name in names:
            if (path / name).is_file():
                return path / name
        raise DataError(f"{path}: no {', '.join(names)} in this folder")
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a SentencePiece model or a tokenizer.json")
    return path


def _vocabulary_and_merges(path: Path, content: bytes) -> tuple[Path, Path] | None:
    """The paths of vocabulary and merges, if `path` is one of them."""
    for vocabulary, merges in _VOCABULARY_AND_MERGES:
        if path.name.endswith(merges):
            pair = path.with_name(path.name.removesuffix(merges) + vocabulary), path
        elif path.name.endswith(vocabulary) and _is_vocabulary(content):
            pair = path, path.with_name(path.name.removesuffix(vocabulary) + merges)
        else:
            continue
        for file in pair:
            if not file.is_file():
                raise DataError(f"{file}: no such file; it belongs to {path.name}")
        return pair
    return None


def _is_vocabulary(content: bytes) -> bool:
    """Whether the content is a JSON object that maps tokens to ids."""
    try:
        parsed: Any = json.loads(content)
    except ValueError:
        return True  # loading the vocabulary then reports the error
    return isinstance(parsed, dict) and not isinstance(parsed.get("model"), dict)
