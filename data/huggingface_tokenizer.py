"""Hugging Face's `tokenizer.json`, and GPT-2's vocabulary and merges, by the `tokenizers` library."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from data.errors import DataError
from data.tokenizer import END_OF_DOCUMENT_NAMES, Tokenizer

_GPT2_END_OF_TEXT = "<|endoftext|>"


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`.

    Text is encoded as text: nothing is added before or after it, nothing cut off, and the names of special tokens
    in it have no meaning. The end-of-document id is that of the one well-known name which the tokenizer has.
    """

    kind = "huggingface"
    file_name = "tokenizer.json"

    def __init__(self, path: Path, content: bytes) -> None:
        """For `load_tokenizer`.

        Raises:
            DataError: the content is not a tokenizer.json.
        """
        super().__init__(path, content)
        with _as_data_errors(f"{path}: not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        if isinstance(self._tokenizer.model, tokenizers.models.BPE):
            self._tokenizer.model.dropout = None  # the same text gives the same ids
        self.drops_characters = self._drops_characters()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        known = [name for name in END_OF_DOCUMENT_NAMES if self.find_id(name) is not None]
        self._tokenizer.add_special_tokens(known)  # which some files have as plain ones, that text may spell
        self.eod_id = self.find_id(known[0]) if len(known) == 1 else None

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`.

        Raises:
            DataError: the tokenizer has no token for a part of the text, and none for what is unknown.
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
        """Byte pair encoding leaves out what it has no token for, unless it is told what to take instead."""
        model = self._tokenizer.model
        if not isinstance(model, tokenizers.models.BPE) or model.unk_token is not None or model.byte_fallback:
            return False
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        return any(self.find_id(character) is None for character in alphabet)


def convert_vocabulary_and_merges(vocabulary: Path, merges: Path) -> bytes:
    """The content of a `tokenizer.json` that encodes as GPT-2 does with these two files.

    Raises:
        DataError: they are not a vocabulary and merges.
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
    """The library raises nothing more special than Exception, and panics, which are not even that."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{what}: {' '.join(str(error).split())}") from None
        raise
