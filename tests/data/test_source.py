"""Tests of windows over several shards, and of the checks when a source is opened."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.files import hash_file
from data.indexed import IndexedShard, bin_path, idx_path
from data.manifest import MANIFEST_NAME, FileRecord, Manifest, pad_vocab_size
from data.source import TokenSource


def write_manifest(folder: Path, names: list[str], split: str = "train") -> Manifest:
    shards = [IndexedShard.open(folder / name) for name in names]
    paths = [path(folder / name) for name in names for path in (bin_path, idx_path)]
    manifest = Manifest(
        split=split,
        splits=(split,),
        num_documents=sum(shard.num_documents for shard in shards),
        num_tokens=sum(shard.num_tokens for shard in shards),
        tokenizer_file="tokenizer.model",
        tokenizer_kind="sentencepiece",
        tokenizer_sha256="0" * 64,
        vocab_size=1000,
        padded_vocab_size=pad_vocab_size(1000),
        eod_id=1,
        files=tuple(FileRecord(path.name, path.stat().st_size, hash_file(path)) for path in paths),
        options={"seed": 0},
        input={},
    )
    manifest.write(folder)
    return manifest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(shard_tokens=st.lists(st.integers(0, 12), min_size=1, max_size=6), seq_len=st.integers(1, 10))
def test_windows_are_slices_of_the_concatenated_shards(
    write_shard, tmp_path: Path, shard_tokens: list[int], seq_len: int
) -> None:
    stops = np.cumsum(shard_tokens).tolist()
    names = [f"shard-{number}" for number in range(len(stops))]
    for name, count, stop in zip(names, shard_tokens, stops, strict=True):
        write_shard(name, [range(stop - count, stop)])
    write_manifest(tmp_path, names)
    source = TokenSource.open(tmp_path)
    assert source.num_tokens == stops[-1]
    if stops[-1] <= seq_len:
        with pytest.raises(DataError, match=f"{stops[-1]} tokens; one sequence of {seq_len} needs {seq_len + 1}"):
            source.num_windows(seq_len)
        return
    num_windows = source.num_windows(seq_len)
    assert num_windows * seq_len + 1 <= stops[-1] < (num_windows + 1) * seq_len + 1
    for window in range(num_windows):
        out = np.full(seq_len + 1, -1)
        source.read_window(window, seq_len, out)
        assert out.tolist() == list(range(window * seq_len, (window + 1) * seq_len + 1))


def test_offsets_are_described_within_their_file(write_shard, tmp_path: Path) -> None:
    for name, count in [("a", 3), ("b", 0), ("c", 2)]:
        write_shard(name, [range(count)])
    write_manifest(tmp_path, ["a", "b", "c"])
    source = TokenSource.open(tmp_path)
    assert source.describe_offset(2) == f"{tmp_path / 'a.bin'}: token 2"
    assert source.describe_offset(3) == f"{tmp_path / 'c.bin'}: token 0"


def test_foreign_pair_is_opened_with_and_without_suffix(write_shard, tmp_path: Path) -> None:
    write_shard("text.v2_document", [[1, 2, 3]])
    for name in ("text.v2_document", "text.v2_document.bin", "text.v2_document.idx"):
        source = TokenSource.open(tmp_path / name)
        assert (source.name, source.manifest, source.num_tokens) == ("text.v2_document", None, 3)


def test_folder_of_foreign_pairs_is_one_source(write_shard, tmp_path: Path) -> None:
    """Shards are sorted by name, numbers in names by value; other files are ignored."""
    contents = {"part_10_document": [9], "part_2_document": [5, 6], "part_2_document_b": [7, 8], "part_1": [], "x": [1]}
    for name, tokens in contents.items():
        write_shard(name, [tokens], "<i4" if name == "x" else "<u2")
    for name in ("README.md", "vocab.json", ".part_0.bin", "part.bin.zip"):
        (tmp_path / name).write_text("x")
    source = TokenSource.open(tmp_path)
    names = [shard.prefix.name for shard in source.shards]
    assert names == ["part_1", "part_2_document", "part_2_document_b", "part_10_document", "x"]
    assert (source.name, source.path, source.manifest, source.num_tokens) == (tmp_path.name, tmp_path, None, 6)
    out = np.empty(6, np.int64)
    source.read_window(0, 5, out)
    assert out.tolist() == [5, 6, 7, 8, 9, 1]
    assert source.document_starts(0, 5).tolist() == [2, 4, 5, 6]


@pytest.mark.parametrize("path", [bin_path, idx_path])
def test_missing_half_of_a_foreign_pair_is_named(write_shard, tmp_path: Path, path) -> None:
    for name in ("a", "b"):
        write_shard(name, [[1]])
    path(tmp_path / "b").unlink()
    with pytest.raises(
        DataError, match=rf"{path(tmp_path / 'b')}: no such file; a shard consists of a .bin and an .idx"
    ):
        TokenSource.open(tmp_path)


def test_unfinished_preparation_is_not_opened_as_a_foreign_folder(write_shard, tmp_path: Path) -> None:
    (tmp_path / "out.partial" / "train").mkdir(parents=True)
    write_shard("out.partial/train/train-00000", [[1]])
    with pytest.raises(DataError, match="an unfinished preparation"):
        TokenSource.open(tmp_path / "out.partial" / "train")
    moved = (tmp_path / "out.partial").rename(tmp_path / "out")
    (moved / "train" / "train-00001.bin.tmp").touch()
    with pytest.raises(DataError, match="an unfinished preparation"):
        TokenSource.open(moved / "train")


def test_source_has_the_datasets_name_and_its_manifest(write_shard, tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        write_shard(f"{split}/{split}-00000", [[1, 2]])
        manifest = write_manifest(tmp_path / split, [f"{split}-00000"], split)
        source = TokenSource.open(tmp_path / split)
        assert source.name == tmp_path.name
        assert source.manifest == manifest


def test_folder_above_the_splits_suggests_them(write_shard, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "out" / "train"
    folder.mkdir(parents=True)
    write_shard("outputs/out/train/a", [[1]])
    write_manifest(folder, ["a"])
    for above in (folder.parent, folder.parent.parent):
        with pytest.raises(DataError, match=rf"did you mean {folder}\?"):
            TokenSource.open(above)


def test_missing_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a folder"):
        TokenSource.open(tmp_path / "absent")
    with pytest.raises(DataError, match=r"manifest\.json: no such file"):
        TokenSource.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("eod_id"), "'eod_id' is missing"),
        (lambda content: content.update(extra=1), "unknown field 'extra'"),
        (lambda content: content.update(vocab_size="1000"), "'vocab_size' is '1000', expected int"),
        (lambda content: content.update(num_tokens=True), "'num_tokens' is True"),
        (lambda content: content.update(format_version=2), "format_version 2, expected 1"),
        (lambda content: content.update(files=[1]), "an object with name"),
        (lambda content: content["files"][0].pop("xxh3"), "'xxh3' is missing"),
        (lambda content: content.update(num_tokens=3), "2 tokens in the shards, 3 in the manifest"),
    ],
)
def test_damaged_manifest_is_an_error(write_shard, tmp_path: Path, change, message: str) -> None:
    write_shard("a", [[1, 2]])
    write_manifest(tmp_path, ["a"])
    content = json.loads((tmp_path / MANIFEST_NAME).read_text())
    change(content)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        TokenSource.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_manifest_that_is_not_json_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=MANIFEST_NAME):
        Manifest.read(tmp_path)


def test_missing_shard_is_named(write_shard, tmp_path: Path) -> None:
    write_shard("a", [[1, 2]])
    write_manifest(tmp_path, ["a"])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin: no such file"):
        TokenSource.open(tmp_path)


def test_vocabulary_is_padded_to_a_multiple_of_64() -> None:
    assert [pad_vocab_size(size) for size in (1, 64, 65, 50_257)] == [64, 64, 128, 50_304]
