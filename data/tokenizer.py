"""What a tokenizer is here, whichever library it comes from."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

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
