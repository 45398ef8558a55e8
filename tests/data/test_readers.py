"""Tests of reading documents, against a simple reference and with any block size, and of error messages."""

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import blocks, streams
from data.blocks import FileSource, JsonLinesBlock, ReadOptions
from data.errors import DataError
from data.inputs import InputFile
from data.readers import read_documents

UNITS = ["file", "line", "block"]
hypothesis_settings = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
sizes = st.integers(1, 12)


def read(path: Path, counts: Counter[str] | None = None, **options: str) -> list[str]:
    given_options = ReadOptions(**options)
    found = [block for block, _ in FileSource(InputFile.open(path)).read_blocks(given_options)]
    return list(read_documents(found, given_options, Counter() if counts is None else counts))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@contextmanager
def block_size(size: int) -> Iterator[None]:
    """Makes blocks and chunks about `size` bytes long."""
    with mock.patch.object(blocks, "BLOCK_BYTES", size), mock.patch.object(streams, "CHUNK_BYTES", size):
        yield


@pytest.fixture(params=[3, 1 << 20], ids=["tiny_blocks", "one_block"])
def any_block_size(request: pytest.FixtureRequest) -> Iterator[None]:
    with block_size(request.param):
        yield


def reference(text: str, document_per: str) -> list[str]:
    """Splits a text with "\\n" line ends into documents."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if document_per == "file":
        return [text]
    if document_per == "line":
        return lines
    groups: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            groups[-1].append(line)
        else:
            groups.append([])
    return ["\n".join(group) for group in groups if group]


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize("document_per", UNITS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("byte_order_mark", [b"", codecs.BOM_UTF8])
def test_document_units_with_all_line_ends_and_byte_order_marks(
    tmp_path: Path, document_per: str, line_end: bytes, byte_order_mark: bytes
) -> None:
    content = "\n\none\ntwo\n\nthree\n \n\n\nfour"
    path = write(tmp_path / "a.txt", byte_order_mark + content.encode().replace(b"\n", line_end))
    assert read(path, document_per=document_per) == reference(content, document_per)


@hypothesis_settings
@given(text=st.text(st.sampled_from("ab\r\n \t\u2028\x0b\x85\u3000é🚀"), max_size=30), size=sizes)
def test_text_documents_equal_a_simple_reference(tmp_path: Path, text: str, size: int) -> None:
    path = write(tmp_path / "a.txt", text.encode())
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    with block_size(size):
        for document_per in UNITS:
            assert read(path, document_per=document_per) == reference(unified, document_per)


@hypothesis_settings
@given(text=st.text(st.sampled_from("ab\r\n"), max_size=20), size=sizes)
def test_newlines_can_be_kept(tmp_path: Path, text: str, size: int) -> None:
    path = write(tmp_path / "a.txt", text.encode())
    with block_size(size):
        assert read(path, document_per="file", newlines="keep") == [text]
        lines = [line.rstrip("\r\n") for line in text.encode().decode().splitlines(keepends=True)]
        assert read(path, document_per="line", newlines="keep") == lines


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize("byte_order_mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("document_per", UNITS)
def test_empty_file_is_an_empty_document(tmp_path: Path, byte_order_mark: bytes, document_per: str) -> None:
    path = write(tmp_path / "a.txt", byte_order_mark)
    assert read(path, document_per=document_per) == ([""] if document_per == "file" else [])


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize(
    ("content", "offset", "byte"),
    [
        (b"\xffabc", "0", "0xFF"),
        (b"fine\nfine\n\xc3(", "10", "0xC3"),
        (b"\n\nfine\n\n\nfine\n\xc3(", "14", "0xC3"),
        (codecs.BOM_UTF8 + b"ab\n\xe9t\xe9", "6", "0xE9"),
        ("häh".encode("utf-16"), "0", "0xFF"),
        (b"a" * 5000 + b"\n\x80", "5,001", "0x80"),
    ],
)
@pytest.mark.parametrize("document_per", UNITS)
def test_undecodable_byte_is_named(tmp_path: Path, content: bytes, offset: str, byte: str, document_per: str) -> None:
    path = write(tmp_path / "bad.txt", content)
    with pytest.raises(DataError, match=rf"bad\.txt: byte {offset} is {byte}: not UTF-8") as error:
        read(path, document_per=document_per)
    assert ("--encoding utf-16" in str(error.value)) == content.startswith(b"\xff\xfe")


@pytest.mark.usefixtures("any_block_size")
def test_documents_with_undecodable_bytes_are_skipped_or_repaired(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\nt\xffw\xc3o\n\xef\xbf\xbd three\n\x80")
    counts: Counter[str] = Counter()
    assert read(path, counts, document_per="line", on_error="skip") == ["one", "\ufffd three"]
    assert counts == {"documents": 4, "skipped": 2}
    counts.clear()
    repaired = ["one", "t\ufffdw\ufffdo", "\ufffd three", "\ufffd"]
    assert read(path, counts, document_per="line", on_error="replace") == repaired
    assert +counts == {"documents": 4, "replaced": 3}


@hypothesis_settings
@given(content=st.binary(max_size=30), size=sizes)
def test_replacement_equals_pythons(tmp_path: Path, content: bytes, size: int) -> None:
    path = write(tmp_path / "a.txt", content)
    with block_size(size):
        found = read(path, on_error="replace", newlines="keep")
    assert found == [content.removeprefix(codecs.BOM_UTF8).decode(errors="replace")]


ENCODINGS = ["latin-1", "utf-16", "utf-16-be", "utf-32", "gb18030", "shift_jis", "euc_kr", "iso2022_jp", "cp1252"]


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("document_per", UNITS)
def test_other_encodings_are_decoded(tmp_path: Path, encoding: str, document_per: str) -> None:
    text = "one\nカタカナ 日本\n\nthree\n".encode(encoding, "ignore").decode(encoding)
    path = write(tmp_path / "a.txt", text.encode(encoding))
    name = streams.check_encoding(encoding)
    assert read(path, document_per=document_per, encoding=name) == reference(text, document_per)
    records = [{"text": line} for line in text.split("\n")]
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    for suffix, content in ((".jsonl", lines), (".json", json.dumps(records, ensure_ascii=False, indent=1))):
        path = write(tmp_path / f"a{suffix}", content.encode(encoding))
        assert read(path, encoding=name) == text.split("\n")


@hypothesis_settings
@given(content=st.binary(max_size=24), encoding=st.sampled_from(["utf-16-le", "utf-32-le", *ENCODINGS]), size=sizes)
def test_undecodable_bytes_in_other_encodings_are_named(
    tmp_path: Path, content: bytes, encoding: str, size: int
) -> None:
    """The error has the same offset as when the whole file is decoded at once."""
    if encoding in ("utf-16", "utf-32"):
        content = "".encode(encoding) + content
    path = write(tmp_path / "a.txt", content)
    with block_size(size):
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError as error:
            with pytest.raises(DataError, match=rf"a\.txt: byte {error.start} is 0x{content[error.start]:02X}: not"):
                read(path, encoding=encoding)
            assert read(path, encoding=encoding, on_error="skip") == []
            assert "\ufffd" in read(path, encoding=encoding, on_error="replace")[0]
        else:
            assert read(path, encoding=encoding, newlines="keep") == [text.removeprefix("\ufeff")]


def test_error_of_a_special_codec_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"two words")
    with pytest.raises(DataError, match=r"a\.txt: not PUNYCODE \(--encoding\)"):
        read(path, encoding="punycode")


def test_missing_byte_order_mark_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text".encode("utf-16-be"))
    with pytest.raises(DataError, match=r"a\.txt: no byte order mark; use --encoding utf-16-le or utf-16-be"):
        read(path, encoding="utf-16")


@pytest.mark.parametrize("name", ["nonsense", "hex", "rot13", "", "undefined", "a\0b"])
def test_unknown_encoding_is_an_error(name: str) -> None:
    with pytest.raises(DataError, match=f"--encoding {name}: unknown"):
        streams.check_encoding(name)


@pytest.mark.usefixtures("any_block_size")
def test_json_lines_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "n": 1}) for text in ["one\r\ntwo", "", "🚀"]]
    path = write(tmp_path / "a.jsonl", codecs.BOM_UTF8 + "\n\r\n\n".join(lines).encode())
    assert read(path) == ["one\ntwo", "", "🚀"]
    assert read(path, newlines="keep") == ["one\r\ntwo", "", "🚀"]


BAD_LINES = [
    (b"{", "not valid JSON"),
    (b"not json", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b'"text"', "expected a JSON object, found str"),
    (b'{"body": "x", "id": 1}', r"no text under 'text' \(--text-key\); keys here: body, id"),
    (b'{"text": null}', r"'text' \(--text-key\) is NoneType, expected a string"),
    (b'{"text": ["x"]}', r"'text' \(--text-key\) is list, expected a string"),
    (b'{"text": "\xff"}', r"byte 28 is 0xFF: not UTF-8"),
    (b'{"text": "a\\ud800"}', "character 1 of the text is a lone surrogate"),
]


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_jsonl_line_is_named_or_skipped(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", b'{"text": "fine"}\n\n' + line + b'\n{"text": "too"}')
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: .*{message}"):
        read(path)
    counts: Counter[str] = Counter()
    assert read(path, counts, on_error="skip") == ["fine", "too"]
    assert counts == {"documents": 3, "skipped": 1}
    if b"\xff" in line or b"\\ud800" in line:
        assert "\ufffd" in read(path, on_error="replace")[1]
    else:
        with pytest.raises(DataError, match=r"use --on-error skip to skip it"):
            read(path, on_error="replace")


def test_surrogate_pairs_in_json_are_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rb'{"text": "\ud83d\ude80 \u00e9"}')
    assert read(path) == ["🚀 é"]


def test_text_key_can_be_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ndjson", b'{"body": "x"}')
    assert read(path, text_key="body") == ["x"]


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=4,
)
records_strategy = st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), json_values), max_size=5)


@hypothesis_settings
@given(records=records_strategy, indent=st.sampled_from([None, 0, 2]), ensure_ascii=st.booleans(), size=sizes)
def test_json_files_may_be_lists_or_sequences(tmp_path: Path, records, indent, ensure_ascii: bool, size: int) -> None:
    """A list, a sequence of objects, and a single object."""
    objects = [{"other": other, "text": text} for text, other in records]
    texts = [text.replace("\r\n", "\n").replace("\r", "\n") for text, _ in records]

    def dump(value: object) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    shapes = [(dump(objects), texts), (f" {dump(objects)}\n\n", texts), ("\n".join(map(dump, objects)), texts)]
    shapes += [(dump(value), [text]) for value, text in zip(objects, texts, strict=True)]
    shapes.append((dump([text for text, _ in records]), texts))
    with block_size(size):
        for content, expected in shapes:
            path = write(tmp_path / "a.json", content.encode("utf-8", "surrogatepass"))
            assert read(path) == expected


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"text": "x"}', "the list is not closed, at character 14"),
        (b'[{"text": "x"}] 1', "unexpected text after the list, at character 16"),
        (b'[{"text": "x"}, {"text": ]', "Expecting value, at character 25"),
        (b'[{"text": "x"}, {"text": "y]', "Unterminated string starting at, at character 25"),
        (b'{\n"text": "x"} {"text": "y"', "Expecting ',' delimiter, at character"),
        (b'[{"text": 3}]', r"record 0: 'text' \(--text-key\) is int, expected a string"),
        (b'[{"text": "x"}, 3]', "record 1: expected a JSON object, found int"),
        (b'{\n"data": [1]}', r"record 0: no text under 'text' \(--text-key\); keys here: data"),
        (b'["x", "\xff"]', "byte 7 is 0xFF: not UTF-8 "),
        (codecs.BOM_UTF8 + '["é",\n'.encode() + b'{"text": "\xf0\x9f\x9a"}]', "byte 20 is 0xF0: not UTF-8 "),
        ('["x"]'.encode("utf-16"), r"byte 0 is 0xFF: not UTF-8, perhaps UTF-16 \(--encoding utf-16\)"),
        (b'["\\ud800"]', "record 0: character 0 of the text is a lone surrogate"),
    ],
)
def test_error_in_a_json_file_names_the_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(DataError, match=rf"bad\.json: .*({message})"):
        read(path)


@hypothesis_settings
@given(content=st.lists(st.sampled_from([b"a", b"\xff", b"\xf0", b"\x9f", b"\x9a", b"\xc3", b"\xa9"])), size=sizes)
def test_undecodable_bytes_in_json_are_repaired_as_in_text(tmp_path: Path, content: list[bytes], size: int) -> None:
    text = b"".join(content)
    path = write(tmp_path / "a.json", b'[{"text": "fine"},\n{"text": "' + text + b'"}]')
    counts: Counter[str] = Counter()
    with block_size(size):
        assert read(path, counts, on_error="replace") == ["fine", text.decode(errors="replace")]
        assert counts["replaced"] == text.decode(errors="replace").count("\ufffd")
        is_bad = counts["replaced"] > 0
        assert read(path, on_error="skip") == (["fine"] if is_bad else ["fine", text.decode()])


def test_json_file_with_json_lines_is_split_like_json_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'\n{"text": "one"}\n{"text": "two"}\n')
    (block, _), *more = FileSource(InputFile.open(path)).read_blocks(ReadOptions())
    assert isinstance(block, JsonLinesBlock) and not more
    assert read(path) == ["one", "two"]


@pytest.mark.parametrize("document_per", UNITS)
def test_ends_of_blocks_ascend_to_the_end_of_the_file(tmp_path: Path, document_per: str) -> None:
    path = write(tmp_path / "a.txt", "é one\n\ntwo\n\nthree".encode() * 20)
    with block_size(9):
        source = FileSource(InputFile.open(path))
        ends = [end for _, end in source.read_blocks(ReadOptions(document_per))]
    assert ends == sorted(ends)
    assert ends[-1] == source.size_bytes
    assert len(ends) == 1 if document_per == "file" else len(ends) > 20
