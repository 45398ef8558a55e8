"""Tests that SentencePiece reproduces every text byte for byte and encodes no text as the end of a document."""

import io
import sys
from pathlib import Path

import pytest
import sentencepiece
import test
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DataError
from data.load_tokenizer import load_tokenizer
from data.sentencepiece_tokenizer import END_OF_DOCUMENT, train_sentencepiece
from data.tokenizer import Tokenizer

UNUSUAL_TEXTS = [
    "",
    " ",
    "  two  spaces  ",
    "\n",
    "\n\n\n a\n",
    "\t\ttabs\t",
    "\r\n and \r",
    "\0\x01\x0b\x0c\x1b\x7f\x85",
    "\u00a0\u2003\u2028\u2029\u3000\ufeff",
    "👩🏽‍🚀 🇳🇱 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "e\u0301 and é, ﬁ, Å, ①, ㌔",
    "العربية עברית हिन्दी ไทย 한국어 日本語 中文 ქართული አማርኛ ᚠᚢᚦ 𒀀𒀁 \U0001d518\U0001d52b",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!",
    "\ufffd\ufffe\U0010ffff",
    "<unk> <s> </s> <pad> <0x0A> <0xFF>",
    "x" * 20_000,
    "0123456789" * 50,
    f"a{END_OF_DOCUMENT}b {END_OF_DOCUMENT}",
]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, texts) -> Tokenizer:
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.model"
    train_sentencepiece([*texts, *UNUSUAL_TEXTS], path, 600, request.param)
    return load_tokenizer(path)


@pytest.mark.parametrize("text", UNUSUAL_TEXTS)
def test_unusual_text_is_reproduced(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@given(text=st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
def test_any_text_is_reproduced(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids


def test_every_character_is_reproduced(tokenizer: Tokenizer) -> None:
    everything = [chr(code) for code in range(1, sys.maxunicode + 1, 7) if not 0xD800 <= code < 0xE000]
    text = "".join(everything).replace("\u2581", "")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_test_files_of_the_interpreter_are_reproduced(tokenizer: Tokenizer) -> None:
    paths = sorted(Path(test.__file__).parent.glob("cjkencodings/*-utf8.txt"))
    if not paths:
        pytest.skip("this interpreter has no test/cjkencodings")
    for path in paths:
        text = path.read_bytes().decode()
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_space_symbol_is_decoded_as_a_space(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\u2581b")) == "a b"


def test_name_of_the_control_piece_is_encoded_as_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"{END_OF_DOCUMENT} x {END_OF_DOCUMENT}")
    assert tokenizer.eod_id not in ids
    assert len(ids) > 4


def test_newline_is_one_piece(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("\n\n")) == 2


def test_training_is_reproducible(tmp_path: Path, texts) -> None:
    for name in ("a", "b"):
        train_sentencepiece(texts, tmp_path / name, 400, "unigram")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_long_lines_are_used_for_training(tmp_path: Path) -> None:
    train_sentencepiece(["characteristically " * 20_000], tmp_path / "model", 285, "bpe")
    assert len(load_tokenizer(tmp_path / "model").encode("characteristically")) < 5


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize(
    ("corpus", "vocab_size", "message"),
    [
        (["a few words"], 8192, r"a vocabulary of 8,192 \(--vocab-size\) is too large for this text"),
        (["a few words"], 100, r"a vocabulary of 100 \(--vocab-size\) is too small for this text"),
        ([], 8192, "no text to train"),
        (["\n"], 8192, "no text to train"),
    ],
)
def test_unsuitable_corpus_is_reported_in_one_line(
    tmp_path: Path, capfd, model_type: str, corpus: list[str], vocab_size: int, message: str
) -> None:
    with pytest.raises(DataError, match=message) as error:
        train_sentencepiece(corpus, tmp_path / "model", vocab_size, model_type)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "model").exists()


def test_invalid_tokenizer_files_are_an_error(tmp_path: Path, capfd) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_tokenizer(tmp_path / "absent.model")
    for content in (b"", b"not a model", bytes(range(256)), b'{"model": {}}', b"{}", b"{"):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.model"):
            load_tokenizer(tmp_path / "bad.model")
    assert capfd.readouterr() == ("", "")


def test_folder_is_loaded_as_the_tokenizer_in_it(tokenizer_path: Path, tmp_path: Path) -> None:
    assert load_tokenizer(tokenizer_path.parent).sha256 == load_tokenizer(tokenizer_path).sha256
    with pytest.raises(DataError, match=r"no tokenizer\.json, tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_model_without_an_end_of_sentence_piece_needs_an_eod_token(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words"] * 9), model_writer=model, vocab_size=12, eos_id=-1, minloglevel=4
    )
    (tmp_path / "a.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path / "a.model")
    assert tokenizer.eod_id is None
    with pytest.raises(DataError, match=r"a\.model: the end-of-document token is not known.*--eod-token"):
        tokenizer.choose_eod_id(None)
    assert tokenizer.choose_eod_id("<s>") == tokenizer.find_id("<s>")
    with pytest.raises(DataError, match=r"--eod-token <other>: .*a\.model has no such token"):
        tokenizer.choose_eod_id("<other>")
