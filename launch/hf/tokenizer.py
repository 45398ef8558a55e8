"""The tokenizer files of an exported folder.

A SentencePiece model is copied (tokenizer.model) and converted to a tokenizer.json, which `transformers` reads. The
conversion:

    SentencePiece                                   tokenizer.json
    a space is written as U+2581                    a normalizer replaces it
    bytes for characters without a piece            byte_fallback
    bpe merges any neighbours that form a piece,    a list of merges: every split of every piece into two pieces,
    the best-scored piece first                     in the order of the pieces' scores
    control and byte pieces never match text        they have no merges (bpe), or a score too low to be chosen (unigram)

One difference remains, for unigram models only: SentencePiece adds scores in 32 bits, `tokenizers` in 64. Where two
splits are equally likely (long runs of one character), rounding decides, and the results may differ. So these folders
also have tokenization_steadyhead.py, which calls SentencePiece itself and is used with `trust_remote_code=True`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"
_OWN_MODULE, _OWN_CLASS = "tokenization_steadyhead", "SteadyheadTokenizer"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _USER_DEFINED, _UNUSED = 1, 4, 5
# How far below the worst piece SentencePiece scores a character without a piece.
_UNKNOWN_PENALTY = 10.0
# Texts on which a converted tokenizer is checked before it is written.
_PROBES = (
    *(
        "",
        " ",
        "  two  spaces  ",
        "\n\n a\n",
        "\t\r\n",
        "\0\x01\x0b\x0c\x1b\x7f\x85",
        "e\u0301 é ﬁ Å ① \u00a0\u3000\ufeff",
        "0123456789" * 5,
    ),
    *("👩🏽‍🚀 🇳🇱", "العربية हिन्दी ไทย 한국어 日本語 𒀀", "\ufffd\U0010ffff", "a\u2581b", "Hello, world! It's fine."),
    "<unk> <s> </s> <pad> <0x0A> <|endoftext|>",
)


@dataclass(frozen=True)
class ExportedTokenizer:
    """Files by name, and remarks for the user (one line each)."""

    files: dict[str, bytes]
    remarks: list[str]


def export_tokenizer(tokenizer: Tokenizer, eod_id: int | None, max_length: int) -> ExportedTokenizer:
    """Creates the files from which `transformers` loads a tokenizer.

    Args:
        eod_id: The end-of-document id, used as begin, end and padding token; None: there is none.
        max_length: The model's longest context.
    """
    name = None if eod_id is None else _token_name(tokenizer, eod_id)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # As in the training data: nothing is added before or after a text, and the name of a special token in a text is
        # encoded as text.
        **({} if name is None else {"bos_token": name, "eos_token": name, "pad_token": name}),
        "add_bos_token": False,
        "add_eos_token": False,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
    }
    remarks: list[str] = []
    if tokenizer.kind == "sentencepiece":
        files, keys, remarks = _sentencepiece_files(tokenizer, name)
        config |= keys
    else:
        files = {"tokenizer.json": _plain_json(tokenizer.content)}
    files["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return ExportedTokenizer(files, remarks)


def _sentencepiece_files(
    tokenizer: Tokenizer, eod_name: str | None
) -> tuple[dict[str, bytes], dict[str, Any], list[str]]:
    """Returns files, keys of tokenizer_config.json, and remarks."""
    from tokenizers.models import BPE

    files, remarks = {"tokenizer.model": tokenizer.content}, []
    keys: dict[str, Any] = {}
    fast, reason = _convert_checked(tokenizer)
    if fast is not None:
        files["tokenizer.json"] = _with_eod(fast, eod_name)
    if fast is None or not isinstance(fast.model, BPE):
        code = Path(__file__).parent / f"{_OWN_MODULE}.py"
        files[code.name] = code.read_bytes()
        keys["auto_map"] = {"AutoTokenizer": [f"{_OWN_MODULE}.{_OWN_CLASS}", None]}
    if fast is None:
        keys["tokenizer_class"] = _OWN_CLASS
        remarks.append(
            f"load the tokenizer with trust_remote_code=True: no tokenizer.json was written, because {reason}"
        )
    return files, keys, remarks


def convert_sentencepiece(content: bytes) -> tokenizers.Tokenizer:
    """Converts a SentencePiece model to the `tokenizers` library.

    Raises:
        ValueError: The library has no equivalent of this model.
    """
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Tokenizer as FastTokenizer

    protobuf: Any = sentencepiece_model_pb2
    model = protobuf.ModelProto.FromString(content)
    kind = model.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise ValueError("only unigram and bpe models of SentencePiece can be converted")
    if any(piece.type == _UNUSED for piece in model.pieces):
        raise ValueError("the SentencePiece model has unused pieces")
    fast = FastTokenizer(_unigram(model) if kind == _UNIGRAM else _bpe(model))
    fast.normalizer = _normalizer(model.normalizer_spec)
    splitter = _splitter(model)
    if splitter is not None:
        fast.pre_tokenizer = splitter
    fast.decoder = _decoder(model.normalizer_spec)
    return fast


def _convert_checked(tokenizer: Tokenizer) -> tuple[tokenizers.Tokenizer | None, str]:
    """Returns the converted and checked tokenizer; or None and the reason."""
    try:
        fast = convert_sentencepiece(tokenizer.content)
    except ValueError as error:
        return None, str(error)
    different = [text for text in _PROBES if fast.encode(text).ids != tokenizer.encode(text)]
    return (None, f"it would split {different[0]!r} differently") if different else (fast, "")


def _unigram(model: Any) -> Any:
    from tokenizers.models import Unigram

    scores = [piece.score for piece in model.pieces if piece.type == _NORMAL]
    best, worst = max(scores), min(scores)
    # Worse than any way to spell the piece's name in single characters.
    never = (worst - _UNKNOWN_PENALTY) * 2 * max(len(piece.piece) for piece in model.pieces)

    def score(piece: Any) -> float:
        if piece.type == _NORMAL:
            return piece.score
        if piece.type == _USER_DEFINED:  # SentencePiece's formula
            return len(piece.piece.encode()) * best - 0.1
        return never

    vocabulary = [(piece.piece, score(piece)) for piece in model.pieces]
    return Unigram(vocabulary, unk_id=model.trainer_spec.unk_id, byte_fallback=model.trainer_spec.byte_fallback)


def _bpe(model: Any) -> Any:
    from tokenizers.models import BPE

    ids = {piece.piece: index for index, piece in enumerate(model.pieces)}
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _NORMAL}
    merges = [
        (-score, ids[piece[:cut]], ids[piece[cut:]], (piece[:cut], piece[cut:]))
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return BPE(
        ids,
        [pair for *_, pair in sorted(merges)],
        unk_token=model.pieces[model.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _splitter(model: Any) -> Any:
    """Isolates text that must not become part of a longer piece.

    In a unigram model: characters in the names of control and byte pieces that are not pieces themselves. They are
    split off in any case; isolating them keeps a whole name from being matched. In a bpe model: user-defined pieces,
    which SentencePiece matches first.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    text_pieces = {piece.piece for piece in model.pieces if piece.type in (_NORMAL, _USER_DEFINED)}
    if model.trainer_spec.model_type == _UNIGRAM:
        names = "".join(piece.piece for piece in model.pieces if piece.type not in (_NORMAL, _USER_DEFINED))
        isolated = sorted(set(names) - text_pieces)
    else:
        isolated = sorted(
            (piece.piece for piece in model.pieces if piece.type == _USER_DEFINED), key=lambda name: -len(name)
        )
    if not isolated:
        return None
    return Split(Regex("|".join(_escape(text) for text in isolated)), "isolated")


def _escape(text: str) -> str:
    return re.escape(text) if text.strip() else "".join(f"\\x{{{ord(character):x}}}" for character in text)


def _normalizer(spec: Any) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _decoder(spec: Any) -> Any:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    return decoders.Sequence(steps)


def _with_eod(fast: tokenizers.Tokenizer, eod_name: str | None) -> bytes:
    """The JSON with the end of a document as a special token."""
    from tokenizers import AddedToken

    if eod_name is not None:
        fast.add_special_tokens([AddedToken(eod_name, special=True, normalized=False)])
    return fast.to_str(pretty=True).encode()


def _plain_json(content: bytes) -> bytes:
    """A tokenizer.json that neither adds to a text nor truncates it, as in the training data."""
    parsed = json.loads(content)
    if (parsed.get("post_processor") or {}).get("type") != "ByteLevel":
        parsed["post_processor"] = None
    parsed["truncation"] = parsed["padding"] = None
    return json.dumps(parsed, indent=2, ensure_ascii=False).encode()


def _token_name(tokenizer: Tokenizer, token_id: int) -> str | None:
    """The token with this id; None if there is none."""
    if token_id >= tokenizer.vocab_size:
        return None
    if tokenizer.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        piece: str = SentencePieceProcessor(model_proto=tokenizer.content).id_to_piece(token_id)
        return piece
    from tokenizers import Tokenizer as FastTokenizer

    name: str | None = FastTokenizer.from_str(tokenizer.content.decode()).id_to_token(token_id)
    return name
