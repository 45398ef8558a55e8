"""Which checkpoints stay, and under which names."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import CheckpointConfig
from launch.checkpoint import retention
from launch.checkpoint.retention import (
    clean_leftovers,
    delete_checkpoint,
    prune_checkpoints,
    supersede_newer_checkpoints,
)


def make(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        (checkpoints / f"step_{step:08d}").mkdir(parents=True)
        (checkpoints / f"step_{step:08d}/manifest.json").write_text("{}")


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name.removeprefix("step_000000") for path in checkpoints.iterdir())


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, None, ["50"]),
        (2, None, ["40", "50"]),
        (9, None, ["10", "20", "30", "40", "50"]),
        (1, 20, ["20", "40", "50"]),
        (2, 30, ["30", "40", "50"]),
    ],
)
def test_the_newest_and_the_multiples_stay(
    keep_last: int, keep_every: int | None, kept: list[str], tmp_path: Path
) -> None:
    make(tmp_path, 10, 20, 30, 40, 50)
    prune_checkpoints(tmp_path, CheckpointConfig(keep_last=keep_last, keep_every=keep_every))
    assert names(tmp_path) == kept


def test_a_checkpoint_that_cannot_be_deleted_is_reported_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 10, 20, 30)
    delete = retention.delete_checkpoint

    def busy(path: Path) -> None:
        if path.name.endswith("10"):
            raise OSError("Device or resource busy")
        delete(path)

    monkeypatch.setattr(retention, "delete_checkpoint", busy)
    prune_checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    assert names(tmp_path) == ["10", "30"]
    (message,) = caplog.messages
    assert f"{tmp_path}/step_00000010 could not be deleted: Device or resource busy" in message


def test_deleting_first_takes_the_name_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the two leaves a folder that the next start removes, and no half checkpoint."""
    make(tmp_path, 10)

    def kill(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(retention.shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            delete_checkpoint(tmp_path / "step_00000010")
    assert names(tmp_path) == ["10.old.partial"]
    make(tmp_path, 20)
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["20"]


def test_checkpoints_beyond_the_start_are_set_aside_under_free_names(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30)
    supersede_newer_checkpoints(tmp_path, 20)
    assert names(tmp_path) == ["10", "20", "30.superseded"]
    make(tmp_path, 30)
    supersede_newer_checkpoints(tmp_path, 10)
    assert names(tmp_path) == ["10", "20.superseded", "30.superseded", "30.superseded_2"]
    assert all((path / "manifest.json").is_file() for path in tmp_path.iterdir())
