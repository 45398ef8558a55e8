"""Tests of `--dataset` with the real library on local files, stored and streamed."""

import json
import sys
from collections import Counter
from pathlib import Path

import datasets
import pytest

from data import prepare
from data.blocks import ReadOptions
from data.dataset import DatasetRequest, DatasetSource
from data.errors import DataError
from data.readers import read_documents

TEXTS = [f"{number} é🚀 text" for number in range(500)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the network and sets a separate cache folder."""
    folder = tmp_path_factory.getbasetemp() / "datasets_cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    for module in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset with two splits, which have two files and one."""
    parts = {"train-0": TEXTS[:200], "train-1": TEXTS[200:450], "validation": TEXTS[450:]}
    for name, texts in parts.items():
        lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def read(request: DatasetRequest, text_key: str = "text") -> list[str]:
    options = ReadOptions(text_key=text_key)
    blocks = [block for block, _ in DatasetSource(request).read_blocks(options)]
    return list(read_documents(blocks, options, Counter()))


@pytest.mark.parametrize("streaming", [False, True])
def test_file_types_and_folders_are_loaded(folder: Path, streaming: bool) -> None:
    files = (str(folder / "train-1.jsonl"), str(folder / "train-0.jsonl"))
    assert read(DatasetRequest("json", data_files=files, streaming=streaming)) == TEXTS[200:450] + TEXTS[:200]
    assert read(DatasetRequest(str(folder), streaming=streaming)) == TEXTS[:450]
    assert read(DatasetRequest(str(folder), split="validation", streaming=streaming)) == TEXTS[450:]


def test_slice_of_a_split_is_loaded(folder: Path) -> None:
    source = DatasetSource(DatasetRequest(str(folder), split="train[10:13]"))
    ((block, done_bytes),) = source.read_blocks(ReadOptions())
    assert list(read_documents([block], ReadOptions(), Counter())) == TEXTS[10:13]
    assert done_bytes == source.size_bytes > 0


def test_folders_written_by_save_to_disk_are_loaded(folder: Path) -> None:
    loaded = datasets.load_dataset(str(folder))
    loaded.save_to_disk(str(folder / "all"))
    loaded["train"].save_to_disk(str(folder / "one"))
    assert read(DatasetRequest(str(folder / "all"), split="validation")) == TEXTS[450:]
    assert read(DatasetRequest(str(folder / "one"))) == TEXTS[:450]
    with pytest.raises(DataError, match=r"no split 'test' \(--split\); splits here: train, validation"):
        read(DatasetRequest(str(folder / "all"), split="test"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("changes", "text_key", "message"),
    [
        ({"name": "absent/set"}, "text", "--dataset absent/set: "),
        ({"name": "/absent"}, "text", "--dataset /absent: FileNotFoundError"),
        ({"split": "test"}, "text", "test"),
        ({"config": "other"}, "text", "other"),
        ({}, "body", r"no column 'body' \(--text-key\); columns here: id, text"),
        ({}, "id", r"column 'id' \(--text-key\) has type int64, expected text"),
    ],
)
def test_loading_errors_are_one_line(
    folder: Path, streaming: bool, changes: dict[str, str], text_key: str, message: str
) -> None:
    request = DatasetRequest(**{"name": str(folder), "streaming": streaming, **changes})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message) as error:
        read(request, text_key)
    assert "\n" not in str(error.value)


def test_error_in_a_damaged_file_is_one_line(folder: Path) -> None:
    (folder / "train-1.jsonl").write_text('{"text": "x"}\n{"text": ')
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"--dataset .*: ") as error:
            read(DatasetRequest(str(folder), streaming=streaming))
        assert "\n" not in str(error.value)


def test_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"--dataset json: requires the library `datasets`: pip install"):
        read(DatasetRequest("json"))


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_gives_the_same_shards_as_its_files(
    folder: Path, tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory, streaming: bool, capsys
) -> None:
    outputs = tmp_path_factory.mktemp("outputs")

    def run(name: str, *arguments: str) -> tuple[int, bytes]:
        output = outputs / name
        code = prepare.main([*arguments, "--output", str(output), "--tokenizer", str(tokenizer_path), "--workers", "1"])
        return code, (output / "train" / "train-00000.bin").read_bytes()

    streamed = ("--streaming",) if streaming else ()
    from_files = run("files", "--input", *(str(folder / f"train-{number}.jsonl") for number in range(2)))
    assert from_files[0] == 0
    assert run("dataset", "--dataset", str(folder), *streamed) == from_files
    assert run("dataset", "--dataset", str(folder), *streamed) == from_files
    assert "nothing to do" in capsys.readouterr().out
    (folder / "train-0.jsonl").write_text('{"id": 1, "text": "other"}')
    assert run("dataset", "--dataset", str(folder), *streamed)[0] == 2
    assert "made from other input" in capsys.readouterr().err


def test_empty_stream_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    with pytest.raises(DataError, match="a file is empty, or the dataset has no rows"):
        read(DatasetRequest("json", data_files=(str(tmp_path / "empty.json"),), streaming=True))
