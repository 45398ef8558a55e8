"""What a tokenizer is here, whichever library it comes from."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from data.errors import DataError

# End-of-document tokens of widely used tokenizers: GPT-2 and many more, SentencePiece and Llama 2, Llama 3, Gemma,
# DeepSeek, BLOOM's kin.
END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "[EOS]",
)
_NAMES_OF_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


class Tokenizer(ABC):
    """A tokenizer: text to ids and back.

    Attributes:
        kind: "sentencepiece" or "huggingface", as in the manifest.
        path: where it was loaded from.
        content: what to write into a file of the name `file_name` to load the same tokenizer from there.
        sha256: hash of `content` in hex.
        vocab_size: number of ids; every id is below it.
        eod_id: the id that ends a document; None if that is not clear.
        drops_characters: whether some characters, having no token, are left out of the ids.
    """

    kind: ClassVar[str]
    file_name: ClassVar[str]

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = 0
        self.eod_id: int | None = None
        self.drops_characters = False

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Load a SentencePiece model, a Hugging Face `tokenizer.json`, or GPT-2's vocabulary and merges.

        Args:
            path: a file, or a folder that holds one by its usual name. Of vocabulary and merges, either file; the
                other one lies beside it: `vocab.json` and `merges.txt`, or `encoder.json` and `vocab.bpe`.

        Raises:
            DataError: no such file, or not a tokenizer.
        """
        from data.huggingface_tokenizer import HuggingFaceTokenizer, convert_vocabulary_and_merges
        from data.sentencepiece_tokenizer import SentencePieceTokenizer

        path = _find_file(Path(path))
        content = path.read_bytes()
        if pair := _vocabulary_and_merges(path, content):
            return HuggingFaceTokenizer(path, convert_vocabulary_and_merges(*pair))
        if path.suffix == ".json" or content.lstrip()[:1] == b"{":
            return HuggingFaceTokenizer(path, content)
        return SentencePieceTokenizer(path, content)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-document id, and without any that a name in the text might stand for."""

    def encode_array(self, text: str) -> np.ndarray:
        """The same ids, as int32 [num_tokens]."""
        return np.array(self.encode(text), np.int32)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ids, such as that of the end of a document, stand for nothing."""

    @abstractmethod
    def find_id(self, token: str) -> int | None:
        """Id of a token by its name."""

    def choose_eod_id(self, token: str | None) -> int:
        """The id that ends a document: that of `token`, else the one that the tokenizer has for it.

        Raises:
            DataError: there is no such token, or it is not clear which one it is.
        """
        if token is not None:
            chosen = self.find_id(token)
            if chosen is None:
                raise DataError(f"--eod-token {token}: {self.path} has no such token")
            return chosen
        if self.eod_id is None:
            known = [name for name in END_OF_DOCUMENT_NAMES if self.find_id(name) is not None]
            found = f"it has {' and '.join(known)}" if known else f"none of {', '.join(END_OF_DOCUMENT_NAMES)}"
            raise DataError(
                f"{self.path}: which token ends a document is not clear ({found}); name it with --eod-token"
            )
        return self.eod_id


def _find_file(path: Path) -> Path:
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model", *(vocabulary for vocabulary, _ in _NAMES_OF_PAIRS))
        for name in names:
            if (path / name).is_file():
                return path / name
        raise DataError(f"{path}: no {', '.join(names)} in this folder")
    if not path.is_file():
        raise DataError(f"{path}: no such file; a SentencePiece model or a tokenizer.json expected")
    return path


def _vocabulary_and_merges(path: Path, content: bytes) -> tuple[Path, Path] | None:
    """The two files, if `path` is one of them."""
    for vocabulary, merges in _NAMES_OF_PAIRS:
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
    """Whether this is a JSON object from tokens to ids."""
    try:
        parsed: Any = json.loads(content)
    except ValueError:
        return True  # which will be said when it is read as one
    return isinstance(parsed, dict) and not isinstance(parsed.get("model"), dict)
