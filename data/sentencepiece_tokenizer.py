"""SentencePiece tokenizers: loads one, or trains one that reproduces every text byte for byte."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from data.errors import DataError
from data.files import write_file
from data.tokenizer import Tokenizer

END_OF_DOCUMENT = "<|endoftext|>"
MODEL_TYPES = ("unigram", "bpe")
MIN_VOCAB_SIZE = 260  # 256 bytes, three other pieces and one character
_TRAINING_THREADS = 4  # fixed, since floating-point sums and thus the result depend on it
_SENTENCE_CHARS = 4096


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    The end-of-document id is that of the model's end-of-sentence piece. It is a control piece: if its name occurs in a
    text, it is encoded like any other text and never as this id.

    With a model of `train_sentencepiece`, `decode(encode(text)) == text`, except that U+2581 (▁), which
    SentencePiece uses for a space, is decoded as a space.
    """

    kind = "sentencepiece"
    file_name = "tokenizer.model"

    def __init__(self, path: Path, content: bytes) -> None:
        """Called by `load_tokenizer`.

        Raises:
            DataError: If the content is not a SentencePiece model.
        """
        super().__init__(path, content)
        try:
            if not content:  # the library would load nothing and raise no error
                raise RuntimeError
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            raise DataError(f"{path}: not a SentencePiece model") from None
        self.vocab_size = self._processor.vocab_size()
        if self.vocab_size == 0:
            raise DataError(f"{path}: not a SentencePiece model")
        eos_id = self._processor.eos_id()
        self.eod_id = eos_id if eos_id >= 0 else None

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._processor.encode(text)

    def encode_array(self, text: str) -> np.ndarray:
        """See `Tokenizer`; avoids an intermediate list."""
        return self._processor.encode(text, return_type="numpy")

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._processor.decode(list(ids))

    def find_id(self, token: str) -> int | None:
        """See `Tokenizer`."""
        token_id = self._processor.piece_to_id(token)
        return token_id if self._processor.id_to_piece(token_id) == token else None


def train_sentencepiece(texts: Iterable[str], out_path: str | Path, vocab_size: int, model_type: str) -> None:
    """Train a tokenizer and write it to `out_path`.

    The text is not changed: there is no normalisation, no spaces are added or removed, newlines are kept, and
    characters without a piece are encoded as bytes. The same texts give the same file.

    Args:
        texts: Documents; they are read once and kept in memory by the trainer.
        out_path: The `.model` file to write.
        vocab_size: Number of ids, including 256 bytes and 3 others.
        model_type: "unigram" or "bpe".

    Raises:
        DataError: If the texts have too few pieces for the vocabulary, or too many different characters.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            num_threads=_TRAINING_THREADS,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            user_defined_symbols=["\n"],
            max_sentence_length=4 * _SENTENCE_CHARS,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=END_OF_DOCUMENT,
            minloglevel=4,
        )
    except (RuntimeError, ValueError) as error:
        raise DataError(_explain_failure(str(error), vocab_size)) from None
    write_file(Path(out_path), model.getvalue())


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the texts, and long ones in parts, since the trainer skips sentences beyond its limit."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _SENTENCE_CHARS):
                yield line[start : start + _SENTENCE_CHARS]


def _explain_failure(message: str, vocab_size: int) -> str:
    vocabulary = f"a vocabulary of {vocab_size:,} (--vocab-size)"
    if limit := re.search(r"Vocabulary size too high.*<= (\d+)", message):
        return f"{vocabulary} is too large for this text, which gives at most {int(limit[1]):,} pieces"
    if minimum := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"{vocabulary} is too small for this text, which needs at least {int(minimum[1]):,} pieces"
    if "sentences_.empty()" in message:
        return "there is no text to train a tokenizer on"
    return f"training the tokenizer failed: {' '.join(message.split())}"
