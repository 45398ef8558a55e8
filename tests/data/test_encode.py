"""Tests that long documents are encoded in segments, with the ids of the whole document and in bounded memory."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from data import encode
from data.blocks import ReadOptions, TextBlock
from data.encode import Encoder, PassageSource, SplitOptions, encode_segments
from data.load_tokenizer import load_tokenizer
from data.tokenizer import Tokenizer

REPOSITORY = Path(__file__).parents[2]


def gpt2_like(folder: Path, texts: list[str]) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    spaces = ["\n\n\n x \n \n y\n\n", "   x"] * 50
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*texts, *spaces], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def llama_like(folder: Path, texts: list[str]) -> Path:
    """Trains a tokenizer that adds a space before the text and encodes newlines as bytes."""
    path = folder / "llama.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            model_type="bpe",
            vocab_size=450,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=4,
        )
    return path


@pytest.fixture(scope="module", params=["ours", "gpt2", "llama", "default"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer_path, texts
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizers")
    if request.param == "ours":
        return load_tokenizer(tokenizer_path)
    if request.param == "default":  # normalises the text and removes spaces
        path = folder / "default.model"
        with path.open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=file, vocab_size=200, minloglevel=4
            )
        return load_tokenizer(path)
    return load_tokenizer({"gpt2": gpt2_like, "llama": llama_like}[request.param](folder, texts))


def encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return np.concatenate(list(encode_segments(tokenizer, text))).tolist()


words = st.sampled_from(["ka", "lo", "x", "12", ".", "é", "'s", "🚀", "<0x0A>"])
spaces = st.sampled_from([" ", " ", "\n", "\n", "  ", "\n\n", " \n", "\n ", "\t", ""])
long_texts = st.lists(st.tuples(words, spaces), min_size=1, max_size=60).map(
    lambda parts: "".join(word + space for word, space in parts)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=long_texts, size=st.integers(1, 40))
def test_segments_give_the_same_ids_as_the_whole_text(tokenizer: Tokenizer, text: str, size: int) -> None:
    with mock.patch.object(encode, "_SEGMENT_CHARS", size):
        assert encode_whole(tokenizer, text) == tokenizer.encode(text)


@given(text=st.text("ab \n", max_size=80), size=st.integers(1, 5), longest=st.integers(6, 20))
def test_segments_end_only_at_allowed_places(text: str, size: int, longest: int) -> None:
    with (
        mock.patch.object(encode, "_SEGMENT_CHARS", size),
        mock.patch.object(encode, "_MAX_SEGMENT_CHARS", longest),
    ):
        cuts = list(encode._cuts(text))
    assert cuts[0] == 0 and cuts[-1] == len(text)
    for start, cut in pairwise(cuts[:-1]):
        assert size <= cut - start <= longest
        if cut - start < longest:
            around = text[cut - 2 : cut + 1] if text[cut - 1] == "\n" else text[cut - 1 : cut + 2]
            assert around[1] in " \n"
            assert not around[0].isspace() and not around[2].isspace()


def test_text_without_an_allowed_place_is_still_reproduced(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    text = "日本語🚀" * 1000
    with (
        mock.patch.object(encode, "_SEGMENT_CHARS", 50),
        mock.patch.object(encode, "_MAX_SEGMENT_CHARS", 100),
    ):
        assert tokenizer.decode(encode_whole(tokenizer, text)) == text


def test_block_is_encoded_document_by_document(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    encoder = Encoder(tokenizer_path, 1, ReadOptions("line"), SplitOptions(0.5, 0))
    texts = [f"line {number}" for number in range(20)]
    encoded = encoder([TextBlock(Path("a"), "\n".join([*texts, "", " "]).encode(), 0)])
    assert [tokens.tolist() for tokens, _ in encoded.documents()] == [[*tokenizer.encode(text), 1] for text in texts]
    assert encoded.tokens.dtype == np.dtype("<u2")
    assert 0 < encoded.is_val.sum() < 20
    assert encoded.counts == {"documents": 22, "empty": 2, "text_bytes": sum(map(len, texts))}
    assert len(encoder([]).tokens) == len(list(encoder([]).documents())) == 0


@given(text=st.text("ab\n", max_size=60))
def test_passages_contain_all_of_a_document_except_line_ends_between_them(text: str) -> None:
    block = TextBlock(Path("a"), text.encode(), 0)
    with mock.patch.object(encode, "_PASSAGE_CHARS", 8):
        passages = [passage.text for passage in PassageSource(ReadOptions(), SplitOptions(0.0, 0))([block])]
    lines = [line for line in text.split("\n") if line]
    # The trainer reads lines, and lines longer than a passage in parts.
    assert "".join(lines) == "".join(passages).replace("\n", "")
    assert all(len(passage) <= 8 for passage in passages)
    if all(len(line) < 8 for line in lines):
        assert [line for passage in passages for line in passage.split("\n") if line] == lines


_MEASURE = """
import re, sys
from pathlib import Path
from data.blocks import ReadOptions, TextBlock
from data.encode import Encoder, SplitOptions
content = Path(sys.argv[2]).read_bytes()
encoded = Encoder(Path(sys.argv[1]), 1, ReadOptions(), SplitOptions(0.0, 0))([TextBlock(Path("a"), content, 0)])
# Not ru_maxrss, which starts at the peak of the parent process.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)
print(len(encoded.tokens), peak)
"""


def test_memory_is_bounded_for_a_long_line(tmp_path: Path, tokenizer_path: Path) -> None:
    """15 MB without a line end take less than 500 MB, including libraries; encoded at once, they take several GB."""
    path = tmp_path / "long.txt"
    path.write_bytes(b"kalomi neru " * 1_250_000)
    command = [sys.executable, "-c", _MEASURE, str(tokenizer_path), str(path)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=True)
    num_tokens, peak_kilobytes = map(int, result.stdout.split())
    assert num_tokens > 1_000_000
    assert peak_kilobytes < 500_000
