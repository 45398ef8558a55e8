"""Hugging Face's `tokenizer.json`, and GPT-2's vocabulary and merges, using the `tokenizers` library."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from data.errors import DataError
from data.tokenizer import END_OF_DOCUMENT_NAMES, Tokenizer

_GPT2_END_OF_TEXT = "<|endoftext|>"


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer from a `tokenizer.json`.

    Encoding adds nothing to the text and truncates nothing, and treats the names of special tokens in it as plain
    text. If the tokenizer has exactly one of the well-known end-of-document tokens, `eod_id` is the id of that token.
    """

    kind = "huggingface"
    file_name = "tokenizer.json"

    def __init__(self, path: Path, content: bytes) -> None:
        """Called by `load_tokenizer`.

        Raises:
            DataError: If the content is not a tokenizer.json.
        """
        super().__init__(path, content)
        with _as_data_errors(f"{path}: not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        if isinstance(self._tokenizer.model, tokenizers.models.BPE):
            self._tokenizer.model.dropout = None  # encoding must be deterministic
        self.drops_characters = self._drops_characters()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        known = [name for name in END_OF_DOCUMENT_NAMES if self.find_id(name) is not None]
        self._tokenizer.add_special_tokens(known)  # in some files they are plain tokens, which text could contain
        self.eod_id = self.find_id(known[0]) if len(known) == 1 else None

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`.

        Raises:
            DataError: If the tokenizer has no token for a part of the text, and no unknown token.
        """
        with _as_data_errors(f"{self.path}: cannot encode a text"):
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def find_id(self, token: str) -> int | None:
        """See `Tokenizer`."""
        return self._tokenizer.token_to_id(token)

    def _drops_characters(self) -> bool:
        """Whether the model is BPE without an unknown token, byte fallback or tokens for all 256 bytes."""
        model = self._tokenizer.model
        if not isinstance(model, tokenizers.models.BPE) or model.unk_token is not None or model.byte_fallback:
            return False
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        return any(self.find_id(character) is None for character in alphabet)


def convert_vocabulary_and_merges(vocabulary: Path, merges: Path) -> bytes:
    """Return the content of a `tokenizer.json` that encodes as GPT-2 does with these two files.

    Raises:
        DataError: If the files are not a vocabulary and merges.
    """
    with _as_data_errors(f"{vocabulary}, {merges.name}: not a vocabulary and its merges"):
        model = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if tokenizer.token_to_id(_GPT2_END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([_GPT2_END_OF_TEXT])
    return tokenizer.to_str().encode()


@contextmanager
def _as_data_errors(what: str) -> Iterator[None]:
    """Turn the library's errors into DataError: bare exceptions, and panics, which do not derive from Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{what}: {' '.join(str(error).split())}") from None
        raise
