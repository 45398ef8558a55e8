"""Preparation from end to end, and what a user sees when something is wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data import encode, inspect, prepare
from data.errors import DataError
from data.indexed import IndexedShard
from data.manifest import Manifest
from data.readers import ReadOptions
from data.source import TokenSource
from data.tokenizer import Tokenizer

REPOSITORY = Path(__file__).parents[2]


def run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)


def folder_content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def decoded_documents(folder: Path) -> list[str]:
    manifest = Manifest.read(folder)
    tokenizer = Tokenizer.load(folder / manifest.tokenizer_file)
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
    """Text files, one document each, and one JSONL file."""
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


def test_every_document_once_in_one_of_the_splits(corpus: Path, tokenizer_path: Path, texts: list[str]) -> None:
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    train, val = (decoded_documents(options.output / split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts)
    assert 5 <= len(val) <= 40
    in_input_order = [text for text in texts if text in set(train)]
    assert train == in_input_order


def test_manifest_tells_what_is_there(corpus: Path, tokenizer_path: Path) -> None:
    options = make_options(corpus, tokenizer_path)
    prepare.prepare(options)
    tokenizer = Tokenizer.load(tokenizer_path)
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
def test_shards_hold_at_most_what_is_asked_for(corpus: Path, tokenizer_path: Path, shard_tokens: int) -> None:
    options = make_options(corpus, tokenizer_path, shard_tokens=shard_tokens)
    prepare.prepare(options)
    shards = TokenSource.open(options.output / "train").shards
    assert all(shard.num_tokens <= shard_tokens or shard.num_documents == 1 for shard in shards)
    following = pairwise(shards)
    assert all(a.num_tokens + b.document_offsets[1] > shard_tokens for a, b in following)


def test_workers_do_not_change_a_byte(corpus: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_TASK_CHARS", 500)
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


def test_killed_worker_is_said(corpus: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_start_worker", partial(os._exit, 1))
    with pytest.raises(DataError, match="a tokenizing process was killed"):
        prepare.prepare(make_options(corpus, tokenizer_path, num_workers=2))


def test_counts_of_what_is_left_out(tmp_path: Path, tokenizer_path: Path, capsys) -> None:
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_fraction": 0.3}, "made with val_fraction = 0.2, now 0.3"),
        ({"seed": 1}, "made with seed = 0, now 1"),
        ({"tokenizer": None, "vocab_size": 400}, "made with tokenizer_sha256"),
        ({"read": ReadOptions("line")}, "made with document_per = file, now line"),
    ],
)
def test_output_of_other_options_is_refused(
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


def test_output_of_other_input_is_refused(corpus: Path, tokenizer_path: Path) -> None:
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
def test_a_users_own_folder_is_never_touched(corpus: Path, tokenizer_path: Path, overwrite: bool) -> None:
    with pytest.raises(DataError, match=r"was not made by data\.prepare"):
        prepare.prepare(make_options(corpus, tokenizer_path, output=corpus, overwrite=overwrite))
    assert (corpus / "000.txt").exists()


def test_failure_half_way_leaves_nothing(corpus: Path, tokenizer_path: Path) -> None:
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


def test_killed_preparation_leaves_nothing_that_looks_finished(
    corpus: Path, tokenizer_path: Path, texts: list[str]
) -> None:
    """SIGKILL after a first shard is complete, with workers running; then the same command again."""
    output = corpus.parent / "out"
    text = "\n".join(texts * 400)  # seconds of work
    for number in range(40):
        (corpus / f"large-{number}.txt").write_text(f"{number} {text}")
    arguments = ["--input", corpus, "--output", output, "--tokenizer", tokenizer_path, "--workers", 2]
    command = [sys.executable, "-m", "data.prepare", *map(str, arguments), "--shard-tokens", "1000"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"writing" in process.stdout.readline()
        finished = output.with_name("out.partial") / "train" / "train-00000.idx"
        while not finished.exists():
            assert process.poll() is None
        process.kill()
        assert process.stdout.read() == b""  # ends when the last worker has let go of it
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    assert finished.exists()
    with pytest.raises(DataError):
        TokenSource.open(output.with_name("out.partial") / "train")

    shutil.rmtree(corpus)
    corpus.mkdir()
    (corpus / "small.txt").write_text("small")
    result = run("data.prepare", *arguments, "--val-fraction", 0)
    assert result.returncode == 0, result.stderr
    assert decoded_documents(output / "train") == ["small"]
    assert not output.with_name("out.partial").exists()


def test_two_preparations_of_one_output(corpus: Path, tokenizer_path: Path) -> None:
    options = make_options(corpus, tokenizer_path)
    with (
        prepare._partial_folder(options.output),
        pytest.raises(DataError, match="another process is preparing this output"),
    ):
        prepare.prepare(options)


def test_command_from_text_to_samples(corpus: Path) -> None:
    output = corpus.parent / "out"
    result = run("data.prepare", "--input", corpus, "--output", output, "--vocab-size", 400)
    assert (result.returncode, result.stderr) == (0, "")
    assert "bytes a token" in result.stdout
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
            "no document for training: 1 found, 1 of them empty",
        ),
        (["--input", "{good}", "--tokenizer", "{bad}"], "{bad}: not a SentencePiece model"),
        (["--input", "{good}"], "a vocabulary of 8,192 is too large for this text"),
        (["--input", "{good}", "--val-fraction", "1.5"], "--val-fraction 1.5"),
        (["--input", "{good}", "--seed", "-1"], "--seed -1: at least 0 expected"),
        (["--input", "{good}", "--workers", "0"], "--workers 0: at least 1 expected"),
        (["--input", "{good}", "--vocab-size", "many"], "argument --vocab-size: invalid int value: 'many'"),
        (["--input", "{good}", "--tokenizer", "{model}", "--vocab-size", "9"], "--tokenizer excludes"),
        (["--input", "{good}", "--colour", "blue"], "unrecognized arguments: --colour blue"),
        ([], "required: --input"),
        (["--input", "{surrogate}", "--tokenizer", "{model}"], "{surrogate}:1: character 1 is half of a"),
    ],
)
def test_a_users_fault_is_one_line(
    tmp_path: Path, tokenizer_path: Path, capfd, arguments: list[str], message: str
) -> None:
    paths = {name: tmp_path / f"{name}.txt" for name in ("absent", "bad", "blank", "good")}
    paths |= {"empty": tmp_path / "empty", "model": tokenizer_path, "surrogate": tmp_path / "s.jsonl"}
    paths["bad"].write_bytes(b"abc\xff")
    paths["blank"].write_text(" \n")
    paths["good"].write_text("a few words")
    paths["surrogate"].write_text('{"text": "a\\ud800"}')
    paths["empty"].mkdir()
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
