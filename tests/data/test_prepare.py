"""End-to-end tests of data.prepare, and of its error messages."""

import fcntl
import gzip
import json
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from data import blocks, command_line, inspect, parallel, prepare
from data import output as output_module
from data.blocks import Position, ReadOptions, RecordBlock, Task
from data.errors import DataError
from data.indexed import IndexedShard
from data.load_tokenizer import load_tokenizer
from data.manifest import Manifest
from data.source import TokenSource

REPOSITORY = Path(__file__).parents[2]
UNUSUAL_TEXTS = [
    "  two  spaces  ",
    "\n\n\n a\n",
    "\t\ttabs\t",
    "x\r\n and \r",
    "\x01\x0b\x0c\x1b\x7f\x85",
    "\u00a0x\u2003\u2028\u2029\u3000\ufeff",
    "👩🏽‍🚀 🇳🇱 e\u0301 and é, ﬁ",
    "العربية עברית हिन्दी ไทย 한국어 日本語 中文 𒀀𒀁 \U0001d518",
    "\ufffd\ufffe\U0010ffff",
    "<unk> <s> </s> <|endoftext|> <0x0A>",
    "x" * 20_000,
]


def run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)


def folder_content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def decoded_documents(folder: Path) -> list[str]:
    manifest = Manifest.read(folder)
    tokenizer = load_tokenizer(folder / manifest.tokenizer_file)
    documents = []
    for name in manifest.shard_names:
        shard = IndexedShard.open(folder / name)
        offsets = shard.document_offsets.tolist()
        for start, stop in pairwise(offsets):
            ids = shard.read(start, stop).tolist()
            assert ids[-1] == manifest.eod_id
            assert manifest.eod_id not in ids[:-1]
            documents.append(tokenizer.decode(ids))
    return documents


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    """Text files with one document each, and one JSONL file."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(texts[:60]):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"text": text}) for text in texts[60:]]
    (folder / "more.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def make_options(corpus: Path, tokenizer_path: Path, **changes: object) -> prepare.Options:
    given: dict[str, object] = {
        "inputs": [str(corpus)],
        "output": corpus.parent / "out",
        "tokenizer": tokenizer_path,
        "val_fraction": 0.2,
    }
    return prepare.Options(**(given | changes))


def test_every_document_is_in_exactly_one_split(corpus: Path, tokenizer_path: Path, texts: list[str]) -> None:
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    train, val = (decoded_documents(options.output / split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts)
    assert 5 <= len(val) <= 40
    in_input_order = [text for text in texts if text in set(train)]
    assert train == in_input_order


def test_manifest_describes_the_output(corpus: Path, tokenizer_path: Path) -> None:
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    tokenizer = load_tokenizer(tokenizer_path)
    for split in ("train", "val"):
        source = TokenSource.open(options.output / split)
        manifest = source.manifest
        assert manifest is not None
        assert (source.name, manifest.split, manifest.splits) == ("out", split, ("train", "val"))
        assert manifest.tokenizer_sha256 == tokenizer.sha256
        assert (manifest.vocab_size, manifest.padded_vocab_size) == (400, 448)
        assert manifest.eod_id == tokenizer.eod_id
        assert (source.path / manifest.tokenizer_file).read_bytes() == tokenizer_path.read_bytes()
        assert manifest.num_documents == sum(shard.num_documents for shard in source.shards)
    assert inspect.main([str(options.output)]) == 0


def test_documents_keep_their_split_when_the_input_grows(corpus: Path, tokenizer_path: Path, texts: list[str]) -> None:
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    before = set(decoded_documents(options.output / "val"))
    (corpus / "aaa.txt").write_text("a new document before all others")
    grown = make_options(corpus, tokenizer_path, output=corpus.parent / "grown")
    prepare.prepare(grown)
    assert set(decoded_documents(grown.output / "val")) & set(texts) == before


@pytest.mark.parametrize("shard_tokens", [1, 300, 10**9])
def test_shards_respect_the_token_limit(corpus: Path, tokenizer_path: Path, shard_tokens: int) -> None:
    options = make_options(corpus, tokenizer_path, shard_tokens=shard_tokens)
    prepare.prepare(options)
    shards = TokenSource.open(options.output / "train").shards
    assert all(shard.num_tokens <= shard_tokens or shard.num_documents == 1 for shard in shards)
    following = pairwise(shards)
    assert all(a.num_tokens + b.document_offsets[1] > shard_tokens for a, b in following)


def test_number_of_workers_does_not_change_a_byte(
    corpus: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files of every type, each in several blocks, and a tokenizer trained on them."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 500)
    monkeypatch.setattr(parallel, "_BYTES_AHEAD", 1000)
    lines = "\n".join(json.dumps({"text": f"again {text}"}) for text in texts)
    (corpus / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (corpus / "b.json").write_text(json.dumps([{"text": f"listed {text}"} for text in texts], indent=1))
    pq.write_table(pa.table({"text": [f"row {text}" for text in texts]}), corpus / "c.parquet", row_group_size=30)
    outputs = []
    for num_workers in (1, 3):
        options = prepare.Options(
            [str(corpus)], corpus.parent / f"{num_workers}", vocab_size=400, num_workers=num_workers
        )
        prepare.prepare(options)
        outputs.append(folder_content(options.output))
    assert outputs[0] == outputs[1]
    names = {"manifest.json", "tokenizer.model", "train-00000.bin", "train-00000.idx"}
    assert {path.name for path in (options.output / "train").iterdir()} == names
    assert {path.name for path in options.output.iterdir()} <= {"train", "val"}


@pytest.mark.parametrize("newlines", ["unify", "keep"])
def test_unusual_documents_are_reproduced_byte_for_byte(tmp_path: Path, newlines: str) -> None:
    """With one document per line of JSON, and a tokenizer trained on them."""
    texts = [text.replace("\0", "") for text in UNUSUAL_TEXTS if text.strip("\0 \n\r\t")]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    output = tmp_path / "out"
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--output", str(output), "--workers", "1", "--val-fraction", "0"]
    assert prepare.main([*arguments, "--vocab-size", "325", "--newlines", newlines]) == 0
    unified = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
    assert decoded_documents(output / "train") == (texts if newlines == "keep" else unified)


def test_errors_are_counted_in_the_manifest(tmp_path: Path, tokenizer_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n\ntwo\0\nt\xe9\xff")
    arguments = ["--input", str(tmp_path / "a.txt"), "--document-per", "line", "--tokenizer", str(tokenizer_path)]
    for on_error, skipped, replaced, documents in (
        ("skip", 2, 0, ["one", "two"]),
        ("replace", 0, 3, ["one", "\ufffd", "two", "t\ufffd\ufffd"]),
    ):
        output = tmp_path / on_error
        code = prepare.main([*arguments, "--on-error", on_error, "--output", str(output), "--val-fraction", "0"])
        assert code == 0
        assert decoded_documents(output / "train") == documents
        counts = Manifest.read(output / "train").counts
        num_bytes = sum(len(document.encode()) for document in documents)
        assert counts == {
            "documents": 5,
            "empty": 1,
            "skipped": skipped,
            "replaced": replaced,
            "nul": 1,
            "text_bytes": num_bytes,
        }
        assert f"skipped {skipped} documents that could not be read, replaced {replaced}" in capsys.readouterr().out


def test_hugging_face_tokenizer_is_stored_with_the_shards(corpus: Path, texts: list[str], capsys) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    path = corpus.parent / "tokenizer.json"
    made.save(str(path))
    output = corpus.parent / "out"
    arguments = ["--input", str(corpus), "--output", str(output), "--tokenizer", str(path), "--workers", "2"]
    assert prepare.main(arguments) == 2
    assert "the end-of-document token is not known" in capsys.readouterr().err
    assert not output.exists()
    assert prepare.main([*arguments, "--eod-token", "</s>"]) == 0
    manifest = Manifest.read(output / "train")
    assert (manifest.tokenizer_kind, manifest.tokenizer_file) == ("huggingface", "tokenizer.json")
    assert (manifest.eod_id, manifest.vocab_size, manifest.padded_vocab_size) == (1, 300, 320)
    assert (output / "train" / "tokenizer.json").read_bytes() == path.read_bytes()
    assert decoded_documents(output / "train")[0] == texts[0]
    assert inspect.main([str(output)]) == 0
    assert prepare.main([*arguments, "--eod-token", "<|endoftext|>"]) == 2
    assert "made with eod_token = </s>, now <|endoftext|>" in capsys.readouterr().err


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    corpus: Path, tokenizer_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(command_line, "_SECONDS_BETWEEN_LINES", 0.0)
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    assert re.search(r"tokenizing: 0 of 0 MB, \d+\.\d MB/s, [\d,]+ tokens, 00:00 left\n", capsys.readouterr().out)
    main_end, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    arguments = ["--input", corpus, "--tokenizer", tokenizer_path, "--output", corpus.parent / "other"]
    command = [sys.executable, "-m", "data.prepare", *map(str, arguments)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # raised when the terminal is closed
            while piece := os.read(main_end, 10_000):
                shown += piece
    os.close(main_end)
    assert process.returncode == 0
    assert re.search(rb"tokenizing:.*\d+%\|.*\|.*<.*MB/s, [\d,]+ tokens", shown)


def test_killed_worker_is_reported() -> None:
    task = Task([RecordBlock("a", "row", 0, ["text"], 4)], Position(0, 1, 4))
    with pytest.raises(DataError, match="a worker process was killed"):
        list(parallel.map_tasks(partial(os._exit, 1), [task], 2))


def test_dropped_documents_and_characters_are_counted(tmp_path: Path, tokenizer_path: Path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in ["one\0 two\0", "", " \n\t", "\0", "three"])
    )
    options = make_options(tmp_path / "a.jsonl", tokenizer_path, val_fraction=0.0)
    prepare.prepare(options)
    assert "skipped 3 empty documents, dropped 3 NUL characters" in capsys.readouterr().out
    assert decoded_documents(options.output / "train") == ["one two", "three"]
    assert not (options.output / "val").exists()


def test_large_vocabulary_is_stored_in_int32(corpus: Path, tokenizer_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("data.indexed._UINT16_VOCAB_LIMIT", 400)
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    assert TokenSource.open(options.output / "train").shards[0].dtype == np.dtype("<i4")


def test_finished_output_is_reused(corpus: Path, tokenizer_path: Path, capsys) -> None:
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    before = {path: path.stat().st_mtime_ns for path in options.output.rglob("*")}
    capsys.readouterr()
    moved = corpus.rename(corpus.parent / "moved")
    prepare.prepare(make_options(moved, tokenizer_path, num_workers=2, output=options.output))
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in options.output.rglob("*")}


def test_output_within_the_input_is_skipped(corpus: Path, tokenizer_path: Path, capsys) -> None:
    for _ in range(2):
        prepare.prepare(make_options(corpus, tokenizer_path, output=corpus / "out"))
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_fraction": 0.3}, "made with val_fraction = 0.2, now 0.3"),
        ({"seed": 1}, "made with seed = 0, now 1"),
        ({"tokenizer": None, "vocab_size": 400}, "made with tokenizer_sha256"),
        ({"read": ReadOptions("line")}, "made with document_per = file, now line"),
    ],
)
def test_output_with_other_options_is_refused(
    corpus: Path, tokenizer_path: Path, changes: dict[str, object], message: str
) -> None:
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    before = folder_content(options.output)
    with pytest.raises(DataError, match=message):
        prepare.prepare(make_options(corpus, tokenizer_path, **changes))
    assert folder_content(options.output) == before
    prepare.prepare(make_options(corpus, tokenizer_path, **changes, overwrite=True))
    assert folder_content(options.output) != before
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus", "out"]


def test_output_from_other_input_is_refused(corpus: Path, tokenizer_path: Path) -> None:
    prepare.prepare(make_options(corpus, tokenizer_path))
    (corpus / "000.txt").write_text("changed")
    with pytest.raises(DataError, match="made from other input; choose another"):
        prepare.prepare(make_options(corpus, tokenizer_path))


def test_damaged_output_is_not_reused(corpus: Path, tokenizer_path: Path) -> None:
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    (options.output / "val" / "val-00000.bin").unlink()
    with pytest.raises(DataError, match=r"val-00000\.bin: no such file.*--overwrite"):
        prepare.prepare(options)


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_of_the_user_is_never_changed(corpus: Path, tokenizer_path: Path, overwrite: bool) -> None:
    with pytest.raises(DataError, match=r"was not made by data\.prepare"):
        prepare.prepare(make_options(corpus, tokenizer_path, output=corpus, overwrite=overwrite))
    assert (corpus / "000.txt").exists()


def test_failure_leaves_no_files(corpus: Path, tokenizer_path: Path) -> None:
    (corpus / "zzz.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"zzz\.txt: byte 0"):
        prepare.prepare(make_options(corpus, tokenizer_path, num_workers=2))
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus"]


def test_leftovers_are_replaced(corpus: Path, tokenizer_path: Path) -> None:
    options = make_options(corpus, tokenizer_path)
    leftover = options.output.with_name("out.partial") / "train"
    leftover.mkdir(parents=True)
    (leftover / "train-00007.bin").touch()
    prepare.prepare(options)
    assert not leftover.exists()
    assert not (options.output / "train" / "train-00007.bin").exists()


def test_output_may_be_a_link(corpus: Path, tokenizer_path: Path) -> None:
    """The link may point to a folder or to nothing; the output is written there and the link is kept."""
    target = corpus.parent / "disk" / "target"
    target.mkdir(parents=True)
    for name, folder in (("link", target), ("dangling", target.with_name("absent"))):
        link = corpus.parent / name
        link.symlink_to(folder)
        prepare.prepare(make_options(corpus, tokenizer_path, output=link))
        assert link.is_symlink() and (folder / "train" / "manifest.json").is_file()
    assert sorted(path.name for path in target.parent.iterdir()) == ["absent", "target"]
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus", "dangling", "disk", "link"]


def test_ignored_files_in_folders_are_reported(corpus: Path, tokenizer_path: Path, capsys) -> None:
    for name in ("page.html", "other.HTML", "archive.txt.bz2", "noname"):
        (corpus / name).touch()
    prepare.prepare(make_options(corpus, tokenizer_path))
    expected = "ignored 4 files of other types: 2 .html, 1 .bz2, 1 without a suffix"
    (said,) = re.findall(r"ignored 4 files.*", capsys.readouterr().out)
    assert sorted(said.split(": ")[1].split(", ")) == sorted(expected.split(": ")[1].split(", "))


def test_two_preparations_cannot_share_an_output(corpus: Path, tokenizer_path: Path) -> None:
    options = make_options(corpus, tokenizer_path)
    with (
        output_module.partial_folder(options.output),
        pytest.raises(DataError, match="another process is preparing this output"),
    ):
        prepare.prepare(options)


def test_commands_prepare_and_inspect_an_output(corpus: Path) -> None:
    output = corpus.parent / "out"
    result = run("data.prepare", "--input", corpus, "--output", output, "--vocab-size", 400)
    assert (result.returncode, result.stderr) == (0, "")
    assert "bytes per token" in result.stdout
    result = run("data.inspect", output, "--samples", 2)
    assert (result.returncode, result.stderr) == (0, "")
    assert "hashes match" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{absent}"], "--input {absent}: no such file"),
        (["--input", "{empty}"], "--input {empty}: no .txt"),
        (["--input", "{bad}"], "{bad}: byte 3 is 0xFF"),
        (["--input", "{blank}"], "no text to train a tokenizer on"),
        (
            ["--input", "{blank}", "--tokenizer", "{model}"],
            "no documents for training: 1 found, 1 empty",
        ),
        (["--input", "{good}", "--tokenizer", "{bad}"], "{bad}: not a SentencePiece model"),
        (["--input", "{good}"], "a vocabulary of 8,192 (--vocab-size) is too large for this text"),
        (["--input", "{good}", "--val-fraction", "1.5"], "--val-fraction 1.5"),
        (["--input", "{good}", "--val-fraction", "1"], "--val-fraction 1.0: expected at least 0 and less than 1"),
        (
            ["--input", "{good}", "--tokenizer", "{model}", "--val-fraction", "0.999999999"],
            "no documents for training: 1 found, 1 for validation (--val-fraction 0.999999999)",
        ),
        (
            ["--input", "{bad}", "--tokenizer", "{model}", "--on-error", "skip"],
            "no documents for training: 1 found, 1 skipped (--on-error skip)",
        ),
        (["--input", "{good}", "--vocab-size", "259"], "--vocab-size 259: expected at least 260"),
        (["--input", "{good}", "--vocab-size", "9" * 11], "training the tokenizer failed: "),
        (["--input", "{good}", "--output", "."], "--output .: this is the current folder and cannot be replaced"),
        (["--input", "{good}", "--output", "/proc"], "--output /proc: this is a mount point and cannot be replaced"),
        (["--input", "{good}", "--output", "{absent}/../empty/.."], "exists and was not made by data.prepare"),
        (["--input", "{good}", "--seed", "-1"], "--seed -1: expected at least 0"),
        (["--input", "{good}", "--workers", "0"], "--workers 0: expected at least 1"),
        (["--input", "{good}", "--vocab-size", "many"], "argument --vocab-size: invalid int value: 'many'"),
        (
            ["--input", "{good}", "--tokenizer", "{model}", "--vocab-size", "9"],
            "--tokenizer cannot be combined with --train-tokenizer",
        ),
        (["--input", "{good}", "--dataset", "json"], "argument --dataset: not allowed with argument --input"),
        (["--input", "{good}", "--split", "train"], "--split: only with --dataset"),
        (["--input", "{good}", "--streaming"], "--streaming: only with --dataset"),
        (["--dataset", "json", "--document-per", "line"], "--document-per: only with --input"),
        (["--dataset", "json", "--encoding", "latin-1"], "--encoding: only with --input"),
        (["--input", "{good}", "--eod-token", "x"], "--eod-token: only with --tokenizer"),
        (
            ["--input", "{good}", "--tokenizer", "{model}", "--eod-token", "<x>"],
            "--eod-token <x>: {model} has no",
        ),
        (["--input", "{good}", "--encoding", "utf-9"], "--encoding utf-9: unknown"),
        (["--input", "{good}", "--on-error", "ignore"], "argument --on-error: invalid choice: 'ignore'"),
        (["--input", "{truncated}", "--tokenizer", "{model}"], "{truncated}: damaged gzip file"),
        (["--input", "{good}/*"], "--input {good}/*: no such file or folder, and no file matches it as a pattern"),
        (["--input", "{good}", "--output", "{good}/out", "--tokenizer", "{model}"], "{good}/out"),
        (["--input", "{good}", "--colour", "blue"], "unrecognized arguments: --colour blue"),
        ([], "one of the arguments --input --dataset is required"),
        (
            ["--input", "{surrogate}", "--tokenizer", "{model}"],
            "{surrogate}:1: character 1 of the text is a lone surrogate",
        ),
    ],
)
def test_user_errors_are_one_line(
    tmp_path: Path, tokenizer_path: Path, capfd, arguments: list[str], message: str
) -> None:
    paths = {name: tmp_path / f"{name}.txt" for name in ("absent", "bad", "blank", "good")}
    paths |= {"empty": tmp_path / "empty", "model": tokenizer_path, "surrogate": tmp_path / "s.jsonl"}
    paths["bad"].write_bytes(b"abc\xff")
    paths["blank"].write_text(" \n")
    paths["good"].write_text("a few words")
    paths["surrogate"].write_text('{"text": "a\\ud800"}')
    paths["empty"].mkdir()
    paths["truncated"] = tmp_path / "t.txt.gz"
    paths["truncated"].write_bytes(gzip.compress(b"a few words")[:-4])
    code = prepare.main(["--output", str(tmp_path / "out"), *(word.format(**paths) for word in arguments)])
    errors = capfd.readouterr().err
    assert code == 2
    assert errors.count("\n") == 1
    assert errors.startswith("error: ")
    assert message.format(**paths) in errors
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("module", ["data.prepare", "data.inspect"])
def test_commands_start_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60, check=True)
    result = run(module, "--help")
    assert result.returncode == 0
    assert f"python -m {module}" in result.stdout
