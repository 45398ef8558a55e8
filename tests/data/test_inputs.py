"""Tests of which files an input refers to."""

import os
from collections import Counter
from pathlib import Path

import pytest

from data import files
from data.errors import DataError
from data.inputs import InputFile, describe_files, find_input_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = ["b.txt", "a.jsonl", "sub/c.md", "ignored.py", ".hidden.txt", ".git/d.txt", "state.json", "é f/g h.TXT.GZ"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def find(folder: Path, *inputs: str, excluded: tuple[Path, ...] = ()) -> list[str]:
    found = find_input_files([str(folder / name) for name in inputs], Counter(), excluded)
    return [file.path.relative_to(folder).as_posix() for file in found]


def test_folders_globs_and_files_are_found_once_and_in_order(folder: Path) -> None:
    assert find(folder, "") == ["a.jsonl", "b.txt", "sub/c.md", "é f/g h.TXT.GZ"]
    assert find(folder, "*.txt") == ["b.txt"]
    assert find(folder, "**/*.md") == ["sub/c.md"]
    assert find(folder, "s*") == ["state.json", "sub/c.md"]
    assert find(folder, "ignored.py", "b.txt", "") == ["ignored.py", "b.txt", "a.jsonl", "sub/c.md", "é f/g h.TXT.GZ"]


def test_file_name_may_contain_pattern_characters(folder: Path) -> None:
    (folder / "[1].txt").touch()
    assert find(folder, "[1].txt") == ["[1].txt"]


def test_output_within_the_input_is_skipped(folder: Path) -> None:
    assert find(folder, "", excluded=(folder / "sub", folder / "absent")) == ["a.jsonl", "b.txt", "é f/g h.TXT.GZ"]
    assert find(folder, "**/*.*", excluded=(folder / "sub",)) == [
        "a.jsonl",
        "b.txt",
        "ignored.py",
        "state.json",
        "é f/g h.TXT.GZ",
    ]


def test_ignored_files_in_folders_are_counted(folder: Path) -> None:
    for name in ("sub/more.PY", "noname", "c.csv.gz", "d.txt.bz2"):
        (folder / name).touch()
    ignored: Counter[str] = Counter()
    find_input_files([str(folder), str(folder / "*.txt")], ignored)
    assert ignored == {".py": 2, "": 1, ".csv.gz": 1, ".bz2": 1}


def test_outputs_of_other_preparations_are_skipped(folder: Path) -> None:
    for name in ("manifest.json", "tokenizer.json", "train-00000.bin", "train-00000.idx"):
        (folder / "sub" / name).touch()
    (folder / "manifest.json").touch()
    assert find(folder, "") == ["a.jsonl", "b.txt", "manifest.json", "é f/g h.TXT.GZ"]


def test_links_are_followed_but_not_in_cycles(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "z.txt").touch()
    (folder / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (folder / "same.txt").symlink_to(folder / "b.txt")
    assert find(folder, "") == ["a.jsonl", "b.txt", "link/z.txt", "sub/c.md", "é f/g h.TXT.GZ"]
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "broken.txt").symlink_to(folder / "absent")
    for given in ("", "broken.txt", "b*.txt"):
        with pytest.raises(DataError, match=r"broken\.txt: a broken link to .*absent"):
            find(folder, given)
    with pytest.raises(DataError, match=r"loop: a broken link to .*loop"):
        find(folder, "loop")


def test_input_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    for given_path in (tmp_path, tmp_path / "absent", tmp_path / "*.txt"):
        with pytest.raises(DataError, match="--input"):
            find_input_files([str(given_path)], Counter())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: neither a file nor a folder"):
        find_input_files([str(tmp_path / "pipe")], Counter())


@pytest.mark.parametrize(
    ("name", "format", "compression"),
    [
        ("a.txt", "text", None),
        ("a.JSONL.GZ", "jsonl", "gzip"),
        ("a.json.zst", "json", "zstd"),
        ("a.parquet", "parquet", None),
        ("a.b.arrow", "arrow", None),
        ("a.gz", "text", "gzip"),
        ("noname", "text", None),
        ("a.py", "text", None),
    ],
)
def test_format_and_compression_follow_from_the_name(
    tmp_path: Path, name: str, format: str, compression: str | None
) -> None:
    (tmp_path / name).write_text("1234")
    assert InputFile.open(tmp_path / name) == InputFile(tmp_path / name, format, compression, 4)


@pytest.mark.parametrize("name", ["a.txt.bz2", "a.xz", "a.zip"])
def test_unsupported_archives_are_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"{name}: \.\w+ files are not supported"):
        InputFile.open(tmp_path / name)


def test_description_depends_on_content_and_format_but_not_on_location(tmp_path: Path) -> None:
    def describe(name: str, content: str) -> object:
        (tmp_path / name).write_text(content)
        return describe_files([InputFile.open(tmp_path / name)])

    first = describe("a.txt", "content")
    assert describe("b.TXT", "content") == first
    assert first not in (describe("a.md", "content"), describe("c.txt", "contents"), describe("d.txt", "Content"))
    assert describe("a.txt.gz", "x") != describe("a.jsonl.gz", "x")
    assert describe(os.fsdecode(b"a.\xff"), "x") != describe("a", "x")


def test_fingerprints_of_large_files_depend_on_samples_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_FINGERPRINT_WHOLE_BYTES", 1000)
    monkeypatch.setattr(files, "_SAMPLE_BYTES", 10)
    path = tmp_path / "a"
    contents = [
        b"x" * 5000,
        b"x" * 4999 + b"y",
        b"y" + b"x" * 4999,
        b"x" * 5001,
        b"x" * 2400 + b"y" * 200 + b"x" * 2400,
    ]
    hashes = set()
    for content in contents:
        path.write_bytes(content)
        hashes.add(files.fingerprint_file(path))
    assert len(hashes) == len(contents)
