"""Tests that `data.inspect` reports damage in shards and shows what is in valid ones."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from data import inspect, prepare
from data.errors import DataError
from data.files import hash_file
from data.indexed import IndexedShardWriter
from data.source import TokenSource


@pytest.fixture
def output(tmp_path: Path, tokenizer_path: Path, texts: list[str]) -> Path:
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    options = prepare.Options([str(tmp_path / "in.jsonl")], tmp_path / "out", tokenizer_path, val_fraction=0.2)
    prepare.prepare(options)
    return options.output


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def rewrite_with_bad_id(path: Path) -> None:
    """Writes a shard with an id outside the vocabulary, and a manifest that is consistent with it."""
    manifest = json.loads((path.parent / "manifest.json").read_text())
    with IndexedShardWriter(path.with_suffix(""), np.dtype("<u2")) as writer:
        writer.add_document(np.array([1, 2, 400]))
    manifest["num_tokens"], manifest["num_documents"] = 3, 1
    for record in manifest["files"]:
        file = path.parent / record["name"]
        record["size_bytes"], record["xxh3"] = file.stat().st_size, hash_file(file)
    (path.parent / "manifest.json").write_text(json.dumps(manifest))


def test_valid_output_is_summarised(output: Path, capsys, texts: list[str]) -> None:
    assert inspect.main([str(output), "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"{output / 'train'}: " in shown
    assert f"{output / 'val'}: " in shown
    assert "hashes match" in shown
    assert "counts of the whole input: documents 100, empty 0, skipped 0, replaced 0, nul 0, text_bytes" in shown
    assert any(repr(text)[1:30] in shown for text in texts)


def test_whole_document_is_printed(output: Path, capsys, texts: list[str]) -> None:
    for shown_path in (output / "train", output / "train/train-00000.bin"):
        assert inspect.main([str(shown_path), "--document", "7"]) == 0
        assert capsys.readouterr().out.rstrip("\n") in [text.rstrip("\n") for text in texts]
    assert inspect.main([str(output / "train"), "--document", "1000"]) == 2
    assert f"--document 1000: {output}/train has documents 0 to " in capsys.readouterr().err


@pytest.mark.parametrize("num_samples", [0, 1, 1000])
def test_requested_number_of_samples_is_printed(output: Path, capsys, num_samples: int) -> None:
    assert inspect.main([str(output / "val"), "--samples", str(num_samples)]) == 0
    shown = capsys.readouterr().out
    num_documents = json.loads((output / "val" / "manifest.json").read_text())["num_documents"]
    assert shown.count("  document ") == min(num_samples, num_documents)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "train-00000.bin: no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "in the manifest"),
        (flip_last_byte, "train-00000.bin: content has changed"),
        (lambda path: flip_last_byte(path.with_suffix(".idx")), "train-00000.idx: content has changed"),
        (lambda path: flip_last_byte(path.with_name("tokenizer.model")), "tokenizer.model: "),
        (lambda path: path.with_name("manifest.json").write_text("{"), "manifest.json: not valid JSON"),
        (rewrite_with_bad_id, "train-00000.bin: token 2 has id 400; expected 0 to 399"),
    ],
)
def test_damage_is_reported_in_one_line(output: Path, capsys, damage, message: str) -> None:
    damage(output / "train" / "train-00000.bin")
    assert inspect.main([str(output)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert message in errors


def test_document_lengths_are_shown_as_a_histogram(write_shard, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "_CHUNK_DOCUMENTS", 3)
    lengths = [0, 1, 2, 3, 4, 7, 8, 9, 100, 127, 128, 1, 1]
    source = TokenSource.open(write_shard("foreign", [range(length) for length in lengths]))
    histogram = inspect.length_histogram(source)
    assert [count for *_, count in histogram] == [
        sum(shortest <= length <= longest for length in lengths) for shortest, longest, _ in histogram
    ]
    assert sum(count for *_, count in histogram) == len(lengths)
    assert histogram[:3] == [(0, 0, 1), (1, 1, 3), (2, 3, 2)] and histogram[-1] == (128, 255, 1)
    assert inspect.length_histogram(TokenSource.open(write_shard("empty", []))) == []
    assert inspect.main([str(source.path)]) == 0
    assert re.search(r"\n +1 +3  #{40}\n +2 to 3 +2  #{27}\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("document", "message"),
    [([5, 6], r"document 3 \(tokens 5 to 7\) ends with id 6"), ([], r"document 3 \(tokens 5 to 5\) is empty")],
)
def test_document_without_an_end_of_document_id_is_an_error(
    write_shard, monkeypatch: pytest.MonkeyPatch, document, message: str
) -> None:
    monkeypatch.setattr(inspect, "_CHUNK_DOCUMENTS", 2)
    source = TokenSource.open(write_shard("shard", [[1], [2, 1], [3, 1], document, [1]]))
    with pytest.raises(DataError, match=rf"shard\.bin: {message}; expected the end-of-document id 1"):
        inspect.check_document_ends(source, 1)
    inspect.check_document_ends(TokenSource.open(write_shard("good", [[1], [2, 1], [3, 1]])), 1)
    inspect.check_document_ends(TokenSource.open(write_shard("empty", [])), 1)


def test_unfinished_preparation_is_reported(tmp_path: Path, capsys) -> None:
    (tmp_path / "out.partial" / "train").mkdir(parents=True)
    for path in (tmp_path / "out.partial", tmp_path / "out.partial" / "train"):
        assert inspect.main([str(path)]) == 2
        assert "an unfinished preparation" in capsys.readouterr().err


def test_foreign_pair_is_summarised(write_shard, capsys) -> None:
    prefix = write_shard("foreign", [[], [5, 6, 7], [8]])
    assert inspect.main([str(prefix)]) == 0
    shown = capsys.readouterr().out
    assert "3 documents, 4 tokens, ids 5 to 8" in shown
    assert "document 1: 5 6 7" in shown


def test_folder_of_foreign_pairs_is_summarised(write_shard, capsys, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    for name, documents in (("part_10", [[9]]), ("part_9", [[5, 6], [7]])):
        write_shard(f"foreign/{name}", documents)
    for path in (tmp_path / "foreign", tmp_path):
        assert inspect.main([str(path)]) == 0
        shown = capsys.readouterr().out
        assert f"{tmp_path / 'foreign'}: 3 documents, 4 tokens, ids 5 to 9" in shown
        assert "part_9.bin: 2 documents, 3 tokens in uint16\n  part_10.bin: 1 documents, 1 tokens" in shown
        assert "document 2: 9" in shown
    (tmp_path / "foreign" / "part_9.bin").write_bytes(b"123")
    assert inspect.main([str(tmp_path / "foreign")]) == 2
    assert "part_9.bin: 3 bytes found, 6 expected by part_9.idx" in capsys.readouterr().err


def test_all_splits_of_several_outputs_are_checked(output: Path, capsys) -> None:
    """Every split is summarised, and damage in each is reported."""
    (output.parent / "all").mkdir()
    first = output.rename(output.parent / "all" / "a")
    shutil.copytree(first, first.with_name("b"))
    assert inspect.main([str(first.parent), "--samples", "0"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{first.parent / name}: " in shown for name in ("a/train", "a/val", "b/train", "b/val"))
    for name in ("a/val/val-00000.bin", "b/train/train-00000.idx"):
        flip_last_byte(first.parent / name)
    assert inspect.main([str(first.parent), "--samples", "0"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("content has changed") == captured.err.count("error: ") == 2
    assert f"{first.parent / 'b/val'}: " in captured.out


def test_negative_id_is_an_error(write_shard, capsys) -> None:
    prefix = write_shard("foreign", [[5], [6, -1]], "<i4")
    assert inspect.main([str(prefix)]) == 2
    assert "foreign.bin: token 2 has id -1" in capsys.readouterr().err


def test_characters_that_the_terminal_lacks_are_escaped(write_shard, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_shard("🚀", [[1]])
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    assert inspect.main([str(prefix)]) == 0
    sys.stdout.flush()
    assert rb"\U0001f680.bin: 1 documents" in shown.getvalue()


def test_missing_path_is_an_error(tmp_path: Path, capsys) -> None:
    assert inspect.main([str(tmp_path / "absent")]) == 2
    assert "absent: neither a folder" in capsys.readouterr().err
