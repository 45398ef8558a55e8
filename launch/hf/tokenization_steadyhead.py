"""The SentencePiece model in tokenizer.model as a tokenizer of `transformers`, which splits every text identically.

`AutoTokenizer.from_pretrained(folder, trust_remote_code=True)` loads it. Otherwise tokenizer.json is loaded, which is
faster and may differ where two ways to split a text are equally likely.
"""

import shutil
from pathlib import Path

import sentencepiece
from transformers import PreTrainedTokenizer


class SteadyheadTokenizer(PreTrainedTokenizer):
    """Adds no tokens before or after a text. The name of a special token in a text is encoded as text."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012 - `transformers` expects a plain attribute
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file, **kwargs):
        self.vocab_file = vocab_file
        self.processor = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        super().__init__(**{"split_special_tokens": True, **kwargs})

    @property
    def vocab_size(self):
        return self.processor.vocab_size()

    def get_vocab(self):
        return {self.processor.id_to_piece(index): index for index in range(self.vocab_size)}

    def save_vocabulary(self, save_directory, filename_prefix=None):
        path = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}tokenizer.model"
        if path.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, path)
        return (str(path),)

    def convert_tokens_to_string(self, tokens):
        return self.processor.decode_pieces(list(tokens))

    def _tokenize(self, text, **kwargs):
        return self.processor.encode(text, out_type=str)

    def _convert_token_to_id(self, token):
        return self.processor.piece_to_id(token)

    def _convert_id_to_token(self, index):
        return self.processor.id_to_piece(index)
