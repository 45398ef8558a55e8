"""Tests that a killed preparation resumes and gives the same bytes, and that a failed one leaves no partial files."""

import errno
import gzip
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import blocks, files, prepare
from data.errors import DataError
from data.indexed import IndexedShard, IndexedShardWriter, bin_path, idx_path
from data.journal import JOURNAL_NAME
from data.parallel import map_tasks
from data.source import TokenSource

REPOSITORY = Path(__file__).parents[2]
KINDS = ("bin", "idx")
# The command with small blocks, writing the journal after each task.
DRIVER = """
import sys
from data import blocks, prepare
prepare._SECONDS_BETWEEN_SAVES = 0.0
blocks.BLOCK_BYTES = 20_000
sys.exit(prepare.main())
"""


def folder_content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    """Files of every type that is read differently."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    parts = [texts[start::5] for start in range(5)]
    lines = "\n".join(json.dumps({"text": text}) for text in parts[0])
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for number, text in enumerate(parts[1]):
        (folder / f"b{number:02d}.txt").write_text(text)
    pq.write_table(pa.table({"text": parts[2]}), folder / "c.parquet", row_group_size=7)
    (folder / "d.json").write_text(json.dumps([{"text": text} for text in parts[3]]))
    (folder / "e.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ["", *parts[4]]))
    return folder


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(blocks, "_ROWS_PER_BATCH", 4)
    monkeypatch.setattr(prepare, "_SECONDS_BETWEEN_SAVES", 0.0)


def make_options(corpus: Path, tokenizer_path: Path, **changes: Any) -> prepare.Options:
    given = {"output": corpus.parent / "out", "tokenizer": tokenizer_path, "val_fraction": 0.3, "shard_tokens": 900}
    return prepare.Options([str(corpus)], **(given | changes))


@contextmanager
def interrupted_after(num_tasks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupts the preparation after this many tasks."""

    def few_tasks(*arguments: Any) -> Iterator[Any]:
        for number, result in enumerate(map_tasks(*arguments)):
            if number == num_tasks:
                raise KeyboardInterrupt
            yield result

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "map_tasks", few_tasks)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.usefixtures("small_steps")
def test_preparation_interrupted_anywhere_resumes_to_the_same_bytes(
    corpus: Path, tokenizer_path: Path, monkeypatch, capsys
) -> None:
    whole = make_options(corpus, tokenizer_path, output=corpus.parent / "whole")
    prepare.prepare(whole)
    expected = folder_content(whole.output)
    num_tasks = len(list(blocks.read_tasks(prepare._open_input(whole, whole.output).sources, whole.read)))
    assert num_tasks >= 8
    assert sum(name.endswith(".bin") for name in expected) > 5
    for stop in range(num_tasks):
        options = make_options(corpus, tokenizer_path, output=corpus.parent / f"out{stop}")
        with interrupted_after(stop, monkeypatch):
            prepare.prepare(options)
        assert not options.output.exists()
        assert (corpus.parent / f"out{stop}.partial").exists() == (stop > 0)
        with interrupted_after((num_tasks - stop) // 2, monkeypatch):
            prepare.prepare(options)
        capsys.readouterr()
        prepare.prepare(options)
        if stop > 0:
            assert "resuming after" in capsys.readouterr().out
        assert folder_content(options.output) == expected


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("change", ["val_fraction", "input", "middle_of_large_input", "tokenizer"])
def test_preparation_with_other_input_or_options_starts_from_scratch(
    corpus: Path, tokenizer_path: Path, monkeypatch, capsys, change: str
) -> None:
    monkeypatch.setattr(files, "_FINGERPRINT_WHOLE_BYTES", 0)
    monkeypatch.setattr(files, "_SAMPLE_BYTES", 1)
    with interrupted_after(6, monkeypatch):
        prepare.prepare(make_options(corpus, tokenizer_path))
    changes: dict[str, Any] = {}
    if change == "val_fraction":
        changes["val_fraction"] = 0.1
    elif change == "tokenizer":
        changes |= {"tokenizer": None, "vocab_size": 400}
    elif change == "input":
        (corpus / "b00.txt").write_text("changed")
    else:
        before = files.fingerprint_file(corpus / "e.jsonl")
        content = bytearray((corpus / "e.jsonl").read_bytes())
        content[content.index(b"ka", len(content) // 2)] = ord("x")
        (corpus / "e.jsonl").write_bytes(content)
        assert files.fingerprint_file(corpus / "e.jsonl") == before  # it covers only a few bytes
    capsys.readouterr()
    options = make_options(corpus, tokenizer_path, **changes)
    prepare.prepare(options)
    assert "resuming after" not in capsys.readouterr().out
    again = make_options(corpus, tokenizer_path, **changes, output=corpus.parent / "again")
    prepare.prepare(again)
    assert folder_content(options.output) == folder_content(again.output)


@pytest.mark.usefixtures("small_steps")
def test_trained_tokenizer_is_kept_for_the_resume(corpus: Path, tokenizer_path: Path, monkeypatch) -> None:
    options = make_options(corpus, tokenizer_path, tokenizer=None, vocab_size=400)
    original = prepare._write_shards

    def interrupted(*arguments: Any) -> Any:
        with interrupted_after(5, monkeypatch):
            original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "_write_shards", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(options)
    monkeypatch.setattr(prepare, "_write_shards", original)
    monkeypatch.setattr(prepare, "train_sentencepiece", None)
    prepare.prepare(options)
    assert options.output.exists()


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"train-00000\.bin: no such file; .*"),
        (lambda path: path.with_suffix(".idx").unlink(), r"train-00000\.idx: no such file; .*"),
        (lambda path: os.truncate(path, 10), r"train-00000\.bin: 10 bytes found, [\d,]+ expected by train-00000\.idx"),
        (
            lambda path: [
                shutil.copy(path.with_name(f"train-00001.{kind}"), path.with_suffix(f".{kind}")) for kind in KINDS
            ],
            r"train: [\d,]+ tokens in the shards, but [\d,]+ were written",
        ),
    ],
)
def test_damage_in_an_unfinished_preparation_is_reported(
    corpus: Path, tokenizer_path: Path, monkeypatch, damage, message: str
) -> None:
    options = make_options(corpus, tokenizer_path)
    with interrupted_after(6, monkeypatch):
        prepare.prepare(options)
    damage(corpus.parent / "out.partial" / "train" / "train-00000.bin")
    with pytest.raises(DataError, match=rf"{message}; remove .*out\.partial to start again"):
        prepare.prepare(options)
    assert not options.output.exists()


def test_preparation_killed_at_random_moments_resumes_to_the_same_bytes(
    corpus: Path, tokenizer_path: Path, texts: list[str]
) -> None:
    """Real processes are killed with SIGKILL at random moments after the journal was written."""
    with (corpus / "e.jsonl").open("a") as file:
        for number in range(60_000):
            file.write("\n" + json.dumps({"text": f"{number} {texts[number % len(texts)]}"}))
    arguments = ["--input", str(corpus), "--tokenizer", str(tokenizer_path), "--shard-tokens", "50000"]
    command = [sys.executable, "-c", DRIVER, *arguments, "--workers", "2", "--output"]
    whole, output = corpus.parent / "whole", corpus.parent / "out"
    subprocess.run([*command, str(whole)], cwd=REPOSITORY, check=True, timeout=100, stdout=subprocess.DEVNULL)
    journal = corpus.parent / "out.partial" / JOURNAL_NAME
    moments = random.Random(0)
    num_kills = 0
    for _ in range(3):
        before = journal.read_bytes() if journal.exists() else b""
        with subprocess.Popen([*command, str(output)], cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while process.poll() is None and (not journal.exists() or journal.read_bytes() == before):
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.1))
            process.kill()
            process.stdout.read()  # returns when the last worker has closed the pipe
        num_kills += process.returncode == -signal.SIGKILL
        assert process.returncode == -signal.SIGKILL or output.exists()
        with pytest.raises(DataError):
            TokenSource.open(journal.parent / "train")
        assert not output.exists() or folder_content(output) == folder_content(whole)
    assert num_kills >= 2
    result = subprocess.run([*command, str(output)], cwd=REPOSITORY, check=True, timeout=100, capture_output=True)
    assert b"resuming after" in result.stdout or b"nothing to do" in result.stdout
    assert folder_content(output) == folder_content(whole)
    assert not journal.parent.exists()


def test_full_disk_is_reported_in_one_line_and_leaves_no_files(corpus: Path, tokenizer_path: Path) -> None:
    """Simulated by a limit on file sizes, at which writes fail in the same place."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    (corpus / "z.txt").write_text("kalomi neru " * 100_000)
    command = [sys.executable, "-m", "data.prepare", "--input", str(corpus), "--tokenizer", str(tokenizer_path)]
    result = subprocess.run(
        [*command, "--output", str(corpus.parent / "out")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=limit,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {corpus.parent}/out.partial: File too large")
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus"]


def test_unreadable_input_is_reported_in_one_line(corpus: Path, tokenizer_path: Path, monkeypatch, capsys) -> None:
    """The error is simulated, since root may read any file."""
    forbidden = corpus / "b00.txt"
    original = Path.open

    def open_unless_forbidden(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_unless_forbidden)
    arguments = ["--input", str(corpus), "--output", str(corpus.parent / "out"), "--tokenizer", str(tokenizer_path)]
    assert prepare.main(arguments) == 2
    assert capsys.readouterr().err == f"error: {forbidden}: Permission denied\n"


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("num_saved", [0, 1, 4])
def test_shard_is_resumed_after_the_saved_documents(tmp_path: Path, num_saved: int, closed: bool) -> None:
    documents = [np.arange(number) for number in (3, 0, 5, 2, 7)]
    with IndexedShardWriter(tmp_path / "whole", np.dtype("<u2")) as whole:
        for document in documents:
            whole.add_document(document)
    writer = IndexedShardWriter(tmp_path / "shard", np.dtype("<u2"))
    for number, document in enumerate(documents):
        if number == num_saved:
            writer.save()
        writer.add_document(document)
    writer.close() if closed else writer.release()
    for _ in range(2):  # killed and resumed twice
        num_tokens = sum(map(len, documents[:num_saved]))
        writer = IndexedShardWriter.resume(tmp_path / "shard", np.dtype("<u2"), num_saved, num_tokens)
        for document in documents[num_saved:]:
            writer.add_document(document)
        writer.release()
    writer = IndexedShardWriter.resume(tmp_path / "shard", np.dtype("<u2"), num_saved, num_tokens)
    for document in documents[num_saved:]:
        writer.add_document(document)
    writer.close()
    for path in (bin_path, idx_path):
        assert path(tmp_path / "shard").read_bytes() == path(tmp_path / "whole").read_bytes()
    assert IndexedShard.open(tmp_path / "shard").num_documents == 5
    assert len(list(tmp_path.iterdir())) == 4


def test_resuming_a_shard_with_missing_documents_is_an_error(tmp_path: Path) -> None:
    writer = IndexedShardWriter(tmp_path / "shard", np.dtype("<u2"))
    writer.add_document(np.arange(10))
    writer.save()
    writer.release()
    for num_documents, num_tokens in ((2, 10), (1, 11)):
        with pytest.raises(DataError, match=r"shard\.bin\.tmp: expected .* tokens; some are missing"):
            IndexedShardWriter.resume(tmp_path / "shard", np.dtype("<u2"), num_documents, num_tokens)
