"""Tests of Hugging Face tokenizers against `transformers`, GPT-2's algorithm, and unusual texts."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data.errors import DataError
from data.load_tokenizer import load_tokenizer
from data.tokenizer import Tokenizer

EOD = "<|endoftext|>"
# From openai/gpt-2, src/encoder.py.
GPT2_WORDS = regex.compile(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")
some_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def train(folder: Path, texts: list[str], special_tokens: list[str]) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE tokenizer with 400 tokens and saves it as tokenizer.json."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A folder with tokenizer.json, and the same tokenizer as vocab.json and merges.txt in `gpt2`."""
    folder = tmp_path_factory.mktemp("huggingface")
    tokenizer = train(folder, texts, [EOD])
    (folder / "gpt2").mkdir()
    tokenizer.model.save(str(folder / "gpt2"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedTokenizerFast:
    """The same tokenizer in `transformers`, which encodes names of special tokens as text."""
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), split_special_tokens=True)


@given(text=some_text)
def test_ids_equal_those_of_transformers_and_texts_are_reproduced(
    theirs: PreTrainedTokenizerFast, tokenizer: Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def gpt2_encoder(folder: Path) -> Callable[[str], list[int]]:
    """Returns an implementation of GPT-2's encoder."""
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")[1:]
    ranks = {tuple(line.split()): rank for rank, line in enumerate(lines) if line}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}

    def encode(text: str) -> list[int]:
        found = []
        for word in GPT2_WORDS.findall(text):
            parts = [letters[byte] for byte in word.encode()]
            while True:
                pairs = [(ranks.get(pair, len(ranks)), n) for n, pair in enumerate(pairwise(parts))]
                rank, at = min(pairs, default=(len(ranks), 0))
                if rank == len(ranks):
                    break
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            found += [ids[part] for part in parts]
        return found

    return encode


@settings(max_examples=60)
@given(text=st.one_of(some_text, st.text(st.sampled_from("kalomi 's\n\t12.é"), max_size=60)))
def test_vocabulary_and_merges_encode_like_gpt2(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder / "gpt2")
    assert tokenizer.encode(text) == gpt2_encoder(folder / "gpt2")(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_and_merges_are_found_under_all_their_names(folder: Path, tmp_path: Path) -> None:
    wanted = load_tokenizer(folder / "gpt2")
    assert wanted.eod_id == wanted.find_id(EOD) == 0
    for vocabulary, merges in (
        ("vocab.json", "merges.txt"),
        ("encoder.json", "vocab.bpe"),
        ("x-vocab.json", "x-merges.txt"),
    ):
        place = tmp_path / vocabulary
        place.mkdir()
        (place / vocabulary).write_bytes((folder / "gpt2" / "vocab.json").read_bytes())
        (place / merges).write_bytes((folder / "gpt2" / "merges.txt").read_bytes())
        for path in (place / vocabulary, place / merges):
            assert load_tokenizer(path).sha256 == wanted.sha256
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "merges.txt").touch()
    with pytest.raises(DataError, match=r"vocab\.json: no such file; it belongs to merges\.txt"):
        load_tokenizer(tmp_path / "alone" / "merges.txt")
    (tmp_path / "alone" / "vocab.json").write_text('{"a": 1')
    with pytest.raises(DataError, match="not a vocabulary and its merges"):
        load_tokenizer(tmp_path / "alone")


def test_stored_copy_is_the_same_tokenizer(folder: Path, tmp_path: Path, texts: list[str]) -> None:
    for path in (folder, folder / "gpt2"):
        tokenizer = load_tokenizer(path)
        (tmp_path / tokenizer.file_name).write_bytes(tokenizer.content)
        travelled = load_tokenizer(tmp_path / tokenizer.file_name)
        assert travelled.sha256 == tokenizer.sha256
        assert [travelled.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    assert load_tokenizer(folder).content == (folder / "tokenizer.json").read_bytes()


def test_names_of_special_tokens_are_encoded_as_text(tokenizer: Tokenizer) -> None:
    text = f"ka{EOD}lo {EOD}"
    ids = tokenizer.encode(text)
    assert tokenizer.eod_id == 0
    assert 0 not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 0]) == text


def test_plain_added_end_of_document_token_is_not_found_in_text(folder: Path, tmp_path: Path) -> None:
    """The library finds plain added tokens in texts, unlike special tokens."""
    train(tmp_path, ["a b"], ["<pad>"]).save(str(tmp_path / "tokenizer.json"))
    changed = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    changed.add_tokens([EOD])
    changed.save(str(tmp_path / "tokenizer.json"))
    eod_id = changed.token_to_id(EOD)
    assert eod_id in changed.encode(f"a{EOD}b").ids
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(f"a{EOD}b")
    assert tokenizer.eod_id == eod_id and eod_id not in ids
    assert tokenizer.decode([*ids, eod_id]) == f"a{EOD}b"


def test_tokenizers_that_drop_characters_are_detected(folder: Path, tmp_path: Path) -> None:
    assert not load_tokenizer(folder).drops_characters
    content = json.loads((folder / "tokenizer.json").read_text())
    path = tmp_path / "tokenizer.json"
    byte = "\u0122"  # stands for 0x80
    vocabulary = {token: number for token, number in content["model"]["vocab"].items() if byte not in token}
    merges = [pair for pair in content["model"]["merges"] if "".join(pair) in vocabulary]
    path.write_text(json.dumps(content | {"model": content["model"] | {"vocab": vocabulary, "merges": merges}}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.drops_characters
    assert len(tokenizer.encode("À")) == 1 and len(load_tokenizer(folder).encode("À")) == 2
    model = content["model"] | {"vocab": vocabulary | {"<unk>": 900}, "merges": merges, "unk_token": "<unk>"}
    path.write_text(json.dumps(content | {"model": model}))
    assert not load_tokenizer(tmp_path).drops_characters
    tokenizers.Tokenizer(models.WordLevel({"a": 0})).save(str(path))
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot encode a text: .*UNK"):
        load_tokenizer(tmp_path).encode("b")


def test_merges_without_a_token_are_an_error(tmp_path: Path, capfd) -> None:
    """The library panics in this case, with an error that does not derive from Exception."""
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(DataError, match=r"vocab\.json, merges\.txt: not a vocabulary and its merges: "):
        load_tokenizer(tmp_path)
    capfd.readouterr()


def test_settings_that_change_the_ids_are_ignored(folder: Path, tmp_path: Path) -> None:
    """Truncation, padding, tokens added around a text, and dropout."""
    changed = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    changed.enable_truncation(4)
    changed.enable_padding(length=50)
    changed.post_processor = processors.TemplateProcessing(single=f"{EOD} $A", special_tokens=[(EOD, 0)])
    changed.model.dropout = 0.5
    changed.save(str(tmp_path / "tokenizer.json"))
    text = "ka lo mi ne ru st to va xi zu " * 20
    assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(folder).encode(text)


@pytest.mark.parametrize(
    ("names", "chosen", "message"),
    [
        ([EOD], EOD, ""),
        (["</s>", "<s>"], "</s>", ""),
        ([EOD, "<|im_end|>"], EOD, ""),
        (["<|begin_of_text|>", "<|end_of_text|>"], "<|end_of_text|>", ""),
        ([EOD, "</s>"], None, r"not known \(it has <\|endoftext\|> and </s>\); set it with --eod-token"),
        (["<stop>"], None, r"not known \(none of <\|endoftext\|>, "),
    ],
)
def test_end_of_document_token_is_chosen_by_name(
    tmp_path: Path, names: list[str], chosen: str | None, message: str
) -> None:
    train(tmp_path, ["a b"], names)
    tokenizer = load_tokenizer(tmp_path)
    if chosen is not None:
        assert tokenizer.choose_eod_id(None) == tokenizer.find_id(chosen) == names.index(chosen)
    else:
        with pytest.raises(DataError, match=message):
            tokenizer.choose_eod_id(None)
    assert tokenizer.choose_eod_id(names[-1]) == len(names) - 1


def test_vocabulary_size_covers_the_largest_id(tmp_path: Path) -> None:
    model = models.WordLevel({"a": 0, "b": 7, "[UNK]": 3}, unk_token="[UNK]")
    plain = tokenizers.Tokenizer(model)
    plain.normalizer = normalizers.Lowercase()
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("A b c") == [0, 7, 3]
