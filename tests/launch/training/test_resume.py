"""Where a run starts: every answer of the table in configs/resume.py, and what makes a checkpoint unusable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.load import load_config, to_yaml
from configs.schema import Config
from launch.distributed.topology import Topology
from launch.errors import RunError, SharedError
from launch.run_folder.folder import RunFolder, mark_done
from launch.training.data import TrainingData, open_data
from launch.training.resume import (
    Start,
    check_folder,
    choose_checkpoint,
    choose_start,
    fixed_differences,
    is_finished,
    previous_configuration,
    record_start,
)
from tests.conftest import write_shard
from tests.launch.conftest import Save
from tests.launch.helpers.threaded_ranks import on_ranks

LONE_RANK = Topology("python", 0, 1, 0, 1, 0, "127.0.0.1", 1)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def data(tiny_config: Path) -> TrainingData:
    return open_data(load_config(tiny_config))[0]


@pytest.fixture
def load(tiny_config: Path) -> Any:
    return lambda *overrides: load_config(tiny_config, overrides)


def start(monkeypatch: pytest.MonkeyPatch, config: Config, folder: RunFolder, data: TrainingData) -> Start | Exception:
    """What `choose_start` returns or raises on a lone rank."""
    (outcome,) = on_ranks(monkeypatch, 1, lambda rank: choose_start(config, folder, data, LONE_RANK))
    assert isinstance(outcome, (Start, SharedError)), outcome
    return outcome


def test_a_run_without_checkpoints_starts_at_step_0(
    monkeypatch: pytest.MonkeyPatch, load: Any, folder: RunFolder, data: TrainingData
) -> None:
    for resume in ("auto", "never"):
        begin = start(monkeypatch, load(f"run.resume={resume}"), folder, data)
        assert begin == Start() and begin.step == 0


def test_auto_takes_the_newest_undamaged_checkpoint(
    monkeypatch: pytest.MonkeyPatch, load: Any, save: Save, folder: RunFolder, data: TrainingData
) -> None:
    older, newer = (save(step, data_fingerprints=list(data.fingerprints))[0] for step in (2, 4))
    begin = start(monkeypatch, load("run.resume=auto"), folder, data)
    assert isinstance(begin, Start) and (begin.checkpoint, begin.step) == (newer, 4)
    assert isinstance(newer, Path)
    (newer / "state.json").unlink()
    begin = start(monkeypatch, load("run.resume=auto"), folder, data)
    assert isinstance(begin, Start) and (begin.checkpoint, begin.step) == (older, 2)
    assert isinstance(older, Path)
    (older / "state.json").unlink()
    outcome = start(monkeypatch, load("run.resume=auto"), folder, data)
    assert isinstance(outcome, SharedError) and "all 2 checkpoints are damaged" in str(outcome)


def test_a_named_checkpoint_is_taken_or_the_run_fails(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    older, _ = (save(step)[0] for step in (2, 4))
    assert isinstance(older, Path)

    def choose(resume: str) -> list[Any]:
        return on_ranks(monkeypatch, 2, lambda rank: choose_checkpoint(resume, older.parent, rank, 2))

    assert choose(str(older)) == [older] * 2
    assert choose("never") == [None] * 2
    (older / "config.yaml").unlink()
    for outcome in choose(str(older)):
        assert isinstance(outcome, SharedError) and f"run.resume: {older} is damaged: " in str(outcome)
    for outcome in choose("/nowhere"):
        assert isinstance(outcome, SharedError) and "/nowhere: no such checkpoint" in str(outcome)


@pytest.mark.parametrize(
    ("override", "changes", "message"),
    [
        ("model.dim=48", {}, "model.dim was 32 and is now 48"),
        ("run.seed=5", {}, "run.seed was 0 and is now 5"),
        ("data.seq_len=16", {}, "data.seq_len was 32 and is now 16"),
        ("optim.name=muon", {}, "holds the state of optim.name=adamw"),
        ("train.stop_step=3", {}, "is at step 4, beyond the last step 3"),
        ("train.steps=6", {"data_fingerprints": ["0" * 32]}, "data.sources.0: "),
        ("train.steps=6", {"skipped_samples": [[0, 8]]}, None),
        ("optim.lr=1", {}, None),
    ],
)
def test_what_must_stay_is_named_and_all_else_may_change(
    override: str,
    changes: dict[str, Any],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    load: Any,
    save: Save,
    folder: RunFolder,
    data: TrainingData,
) -> None:
    save(4, **{"data_fingerprints": list(data.fingerprints), **changes})
    begin = start(monkeypatch, load(override), folder, data)
    if message is not None:
        assert isinstance(begin, SharedError) and message in str(begin)
    else:
        assert isinstance(begin, Start) and begin.step == 4
        assert [list(one) for one in begin.skipped.ranges] == changes.get("skipped_samples", [])


def test_init_from_takes_weights_alone_and_looks_at_all_files(
    monkeypatch: pytest.MonkeyPatch, load: Any, save: Save, tmp_path: Path, data: TrainingData
) -> None:
    path, _ = save(4)
    assert isinstance(path, Path)
    config, elsewhere = load(f"run.init_from={tmp_path}/run", "model.num_layers=1"), RunFolder(tmp_path / "other")
    begin = start(monkeypatch, config, elsewhere, data)
    assert isinstance(begin, Start) and (begin.checkpoint, begin.state, begin.step) == (path, None, 0)
    (path / "rank_00001.safetensors").unlink()
    outcome = start(monkeypatch, config, elsewhere, data)
    assert isinstance(outcome, SharedError) and f"run.init_from: {path} is damaged: " in str(outcome)


def test_never_refuses_a_folder_that_holds_a_run(load: Any, save: Save, folder: RunFolder) -> None:
    check_folder(folder, load("run.resume=never"))
    folder.path.mkdir(exist_ok=True)
    folder.metrics.write_text("")
    with pytest.raises(RunError, match=r"run\.resume=never, but .* already holds a run"):
        check_folder(folder, load("run.resume=never"))
    folder.metrics.unlink()
    save(2)
    with pytest.raises(RunError, match=r"run\.resume=never, but .* already holds a run"):
        check_folder(folder, load("run.resume=never"))
    check_folder(folder, load("run.resume=auto"))


def test_another_model_is_refused_only_beside_checkpoints(load: Any, save: Save, folder: RunFolder) -> None:
    folder.path.mkdir(exist_ok=True)
    folder.config.write_text(to_yaml(load()))
    check_folder(folder, load("model.dim=48"))  # nothing is lost
    save(2)
    with pytest.raises(RunError, match=r"another model or data: model\.dim was 32 and is now 48"):
        check_folder(folder, load("model.dim=48"))


def test_a_lost_configuration_is_read_from_the_newest_checkpoint(load: Any, save: Save, folder: RunFolder) -> None:
    assert previous_configuration(folder) == {}
    save(2)
    assert previous_configuration(folder) == load().model_dump(mode="json")
    folder.config.write_text("optim: {lrr: 1}")  # no valid configuration
    assert previous_configuration(folder) == load().model_dump(mode="json")
    folder.config.write_text(to_yaml(load("optim.lr=0.25")))
    assert previous_configuration(folder)["optim"]["lr"] == 0.25


def test_sources_may_move_but_not_change_their_weights(load: Any, tmp_path: Path) -> None:
    moved = write_shard(tmp_path / "moved", seed=1)
    old = load().model_dump(mode="json")
    assert fixed_differences(old, load(f"data.sources.0.path={moved}", "optim.lr=1").model_dump(mode="json")) == []
    (line,) = fixed_differences(old, load("data.sources.0.weight=2").model_dump(mode="json"))
    assert line.startswith("data.sources")
    assert fixed_differences({}, old) == []


def test_a_start_writes_the_configuration_and_lists_what_changed(load: Any, folder: RunFolder) -> None:
    folder.path.mkdir()
    assert record_start(folder, load(), before=None) == []
    mark_done(folder, step=6, loss=1.0)
    assert record_start(folder, load("optim.lr=0.25", "run.resume=never"), before=None) == ["optim.lr: 0.005 -> 0.25"]
    assert not folder.done.exists()
    assert yaml.safe_load(folder.config.read_text())["optim"]["lr"] == 0.25
    assert record_start(folder, load("optim.lr=0.5"), before=load("optim.lr=0.75")) == ["optim.lr: 0.75 -> 0.5"]


def test_only_auto_leaves_a_finished_run_alone(
    load: Any, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def finished(*overrides: str) -> bool:
        (outcome,) = on_ranks(monkeypatch, 1, lambda rank: is_finished(folder, load(*overrides)))
        assert isinstance(outcome, bool), outcome
        return outcome

    folder.path.mkdir()
    assert not finished()
    mark_done(folder, step=6, loss=1.0)
    assert finished()
    assert "is finished (step 6); nothing to do" in caplog.text
    assert not finished("train.steps=7")
    assert not finished("run.resume=runs/other")
    folder.done.write_text("{")
    assert not finished()
