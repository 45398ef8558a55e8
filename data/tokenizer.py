"""The interface of tokenizers, whichever library they come from."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from data.errors import DataError

# End-of-document tokens of widely used tokenizers: GPT-2, SentencePiece and Llama 2, Llama 3, Gemma, DeepSeek, others.
END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "[EOS]",
)


class Tokenizer(ABC):
    """A tokenizer: text to ids and back.

    Attributes:
        kind: "sentencepiece" or "huggingface", as in the manifest.
        file_name: Name under which a copy of the tokenizer is stored.
        path: The file that it was loaded from.
        content: Content of a file `file_name` from which the same tokenizer can be loaded.
        sha256: Hex hash of `content`.
        vocab_size: Number of ids; every id is below it.
        eod_id: The id that ends a document; None if it is not known.
        drops_characters: Whether characters that have no token are dropped.
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

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document id; names of special tokens are encoded as text."""

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a text as int32 [num_tokens]."""
        return np.array(self.encode(text), np.int32)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens such as the end-of-document token."""

    @abstractmethod
    def find_id(self, token: str) -> int | None:
        """Return the id of a token by its name, None if there is no such token."""

    def choose_eod_id(self, token: str | None) -> int:
        """Return the id that ends a document: that of `token` or, if this is None, the tokenizer's own.

        Raises:
            DataError: If there is no such token, or the tokenizer's own is not known.
        """
        if token is not None:
            chosen = self.find_id(token)
            if chosen is None:
                raise DataError(f"--eod-token {token}: {self.path} has no such token")
            return chosen
        if self.eod_id is None:
            known = [name for name in END_OF_DOCUMENT_NAMES if self.find_id(name) is not None]
            found = f"it has {' and '.join(known)}" if known else f"none of {', '.join(END_OF_DOCUMENT_NAMES)}"
            raise DataError(f"{self.path}: the end-of-document token is not known ({found}); set it with --eod-token")
        return self.eod_id
