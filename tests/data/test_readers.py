"""Input files to documents, and how bad ones are named."""

import codecs
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.readers import ReadOptions, find_input_files, read_documents


def read(path: Path, **options: str) -> list[str]:
    return [document.text for document in read_documents(path, ReadOptions(**options))]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("document_per", "expected"),
    [
        ("file", ["one\ntwo\n\nthree\n \n\n\nfour"]),
        ("line", ["one", "two", "", "three", " ", "", "", "four"]),
        ("paragraph", ["one\ntwo", "three", "four"]),
    ],
)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("byte_order_mark", [b"", codecs.BOM_UTF8])
def test_units_line_ends_and_byte_order_marks(
    tmp_path: Path, document_per: str, expected: list[str], line_end: bytes, byte_order_mark: bytes
) -> None:
    content = b"one\ntwo\n\nthree\n \n\n\nfour".replace(b"\n", line_end)
    path = write(tmp_path / "a.txt", byte_order_mark + content)
    assert read(path, document_per=document_per) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(st.sampled_from("ab\r\n \u2028\x0b\x85é"), max_size=20))
def test_text_against_a_simple_reference(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.txt", text.encode())
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = unified.split("\n")
    if lines[-1] == "":
        lines.pop()
    assert read(path, document_per="file") == [unified]
    assert read(path, document_per="line") == lines
    paragraphs, current = [], []
    for line in [*lines, ""]:
        if line.strip():
            current.append(line)
        elif current:
            paragraphs.append("\n".join(current))
            current = []
    assert read(path, document_per="paragraph") == paragraphs


@pytest.mark.parametrize("document_per", ["file", "line", "paragraph"])
def test_documents_end_within_the_file_and_in_order(tmp_path: Path, document_per: str) -> None:
    path = write(tmp_path / "a.txt", "é one\n\ntwo\n\nthree".encode())
    ends = [document.end_bytes for document in read_documents(path, ReadOptions(document_per))]
    assert ends == sorted(ends)
    assert ends[-1] == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "offset", "byte"),
    [
        (b"\xffabc", "0", "0xFF"),
        (b"fine\nfine\n\xc3(", "10", "0xC3"),
        (codecs.BOM_UTF8 + b"ab\n\xe9t\xe9", "6", "0xE9"),
        ("häh".encode("utf-16"), "0", "0xFF"),
        (b"a" * 5000 + b"\n\x80", "5,001", "0x80"),
    ],
)
@pytest.mark.parametrize("document_per", ["file", "line", "paragraph"])
def test_undecodable_byte(tmp_path: Path, content: bytes, offset: str, byte: str, document_per: str) -> None:
    path = write(tmp_path / "bad.txt", content)
    with pytest.raises(DataError, match=rf"bad\.txt: byte {offset} is {byte}"):
        read(path, document_per=document_per)


def test_jsonl(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "n": 1}) for text in ["one\r\ntwo", "", "🚀"]]
    path = write(tmp_path / "a.jsonl", codecs.BOM_UTF8 + "\n\n".join(lines).encode())
    assert read(path) == ["one\ntwo", "", "🚀"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON"),
        (b"not json", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'"text"', "a JSON object expected, str found"),
        (b'{"body": "x", "id": 1}', r"no text under 'text' \(--text-key\); keys here: body, id"),
        (b'{"text": null}', "no text under 'text'"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: .*{message}"):
        read(path)


def test_another_text_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ndjson", b'{"body": "x"}')
    assert read(path, text_key="body") == ["x"]


def test_folders_globs_and_files_each_once_and_in_order(tmp_path: Path) -> None:
    for name in ["b.txt", "a.jsonl", "sub/c.md", "ignored.py", ".hidden.txt", ".git/d.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def find(*inputs: str) -> list[str]:
        files = find_input_files([str(tmp_path / name) for name in inputs])
        return [file.relative_to(tmp_path).as_posix() for file in files]

    assert find("") == ["a.jsonl", "b.txt", "sub/c.md"]
    assert find("*.txt") == ["b.txt"]
    assert find("**/*.md") == ["sub/c.md"]
    assert find("ignored.py", "b.txt", "") == ["ignored.py", "b.txt", "a.jsonl", "sub/c.md"]


def test_input_that_stands_for_nothing(tmp_path: Path) -> None:
    for given_path in (tmp_path, tmp_path / "absent", tmp_path / "*.txt"):
        with pytest.raises(DataError, match="--input"):
            find_input_files([str(given_path)])
