"""What any number of ranks saved, any other number restores; a failed save leaves the older checkpoints alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launch.checkpoint import save as save_module
from launch.checkpoint.files import MANIFEST, STATE, CheckpointReader, file_entry, find_faults
from launch.checkpoint.restore import restore
from launch.errors import RunError, SharedError
from tests.launch.conftest import Save
from tests.launch.helpers.fake_engine import FakeEngine
from tests.launch.helpers.threaded_ranks import on_ranks

WHOLE = torch.arange(19.0)


@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2)])
def test_every_element_comes_back_on_other_ranks(
    saved_on: int, restored_on: int, is_replicated: bool, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, *others = save(4, saved_on, is_replicated)
    assert isinstance(path, Path) and all(other == path for other in others)
    assert path.name == "step_00000004" and find_faults(path) == []
    with CheckpointReader(path) as reader:
        torch.testing.assert_close(reader.read_parameter("first"), WHOLE[:15].view(3, 5), rtol=0, atol=0)
        moment = torch.empty(4)
        reader.read_range("exp_avg_sq", "second", moment, 0)
        assert moment.tolist() == (WHOLE[15:] + 200).tolist()

    engines = [FakeEngine(rank, restored_on) for rank in range(restored_on)]
    assert on_ranks(monkeypatch, restored_on, lambda rank: restore(engines[rank], path)) == [None] * restored_on  # type: ignore[arg-type]
    assert torch.cat([engine.flat for engine in engines]).tolist() == WHOLE.tolist()
    for kind, added in (("exp_avg", 100), ("exp_avg_sq", 200)):
        states = [engine.base_optimizer.state[engine.flat] for engine in engines]
        assert torch.cat([state[kind] for state in states]).tolist() == (WHOLE + added).tolist()
        assert [state["step"].item() for state in states] == [7.0] * restored_on
    for engine in engines:
        assert engine.num_published == 1
        assert engine.policy[0] == {"progress": 3} and engine.policy[1]["norms"].tolist() == [1.0, 2.0]


def test_weights_only_leaves_the_optimizer_and_the_random_state(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = save(4, num_ranks=1)
    assert isinstance(path, Path)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    engine = FakeEngine(0, 1)
    on_ranks(monkeypatch, 1, lambda rank: restore(engine, path, weights_only=True))  # type: ignore[arg-type]
    assert engine.flat.tolist() == WHOLE.tolist()
    assert not engine.base_optimizer.state and engine.policy == ({}, {})
    assert torch.equal(torch.get_rng_state(), before)


def test_the_random_state_comes_back_on_the_same_number_of_ranks(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    (path,) = save(4, num_ranks=1)
    expected = torch.rand(3)
    torch.manual_seed(6)
    engine = FakeEngine(0, 1)
    on_ranks(monkeypatch, 1, lambda rank: restore(engine, path))  # type: ignore[arg-type]
    assert torch.equal(torch.rand(3), expected)


def test_every_parameter_that_does_not_fit_is_named_on_every_rank(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = save(4)
    monkeypatch.setattr(FakeEngine, "parameter_shapes", lambda engine: {"first": (3, 4), "third": (2,)})
    outcomes = on_ranks(monkeypatch, 2, lambda rank: restore(FakeEngine(rank, 2), path))  # type: ignore[arg-type]
    for outcome in outcomes:
        assert isinstance(outcome, SharedError)
        for line in (
            "first: shape [3, 5] in the checkpoint, [3, 4] in the model",
            "third: missing in the checkpoint",
            "second: missing in the model",
        ):
            assert line in str(outcome)


def test_the_manifest_lists_every_file_and_the_tokenizer_comes_along(save: Save) -> None:
    path, _ = save(4)
    assert isinstance(path, Path)
    files = json.loads((path / MANIFEST).read_text())["files"]
    assert files.keys() == {entry.name for entry in path.iterdir()} - {MANIFEST}
    assert {"tokenizer.model", STATE, "config.yaml", "rank_00000.safetensors", "rank_00001.safetensors"} == set(files)
    for name, entry in files.items():
        assert entry == file_entry(path / name)
    assert (path / "tokenizer.model").read_bytes() == b"a tokenizer"


def test_a_failure_on_one_rank_removes_the_unfinished_folder_and_keeps_older_ones(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(4)
    write = save_module.write_safetensors

    def full_disk(path: Path, *arguments: object) -> str:
        if path.name == "rank_00001.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "write_safetensors", full_disk)
        outcomes = save(8)
    assert all(isinstance(outcome, SharedError) and "rank 1: " in str(outcome) for outcome in outcomes), outcomes
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000004"]
    assert save(8) == [tmp_path / "run/checkpoints/step_00000008"] * 2


def test_weights_that_are_not_finite_are_not_saved(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = FakeEngine.fill

    def poisoned(engine: FakeEngine) -> FakeEngine:
        fill(engine).flat[-1] = torch.nan
        return engine

    monkeypatch.setattr(FakeEngine, "fill", poisoned)
    (outcome,) = save(4, num_ranks=1)
    assert isinstance(outcome, SharedError) and "second has non-finite weights" in str(outcome)
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


def test_a_vanished_run_folder_is_not_made_again(save: Save, tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    for outcome in save(4):
        assert isinstance(outcome, SharedError) and "the run's folder no longer exists" in str(outcome)
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_saved_again_replaces_its_checkpoint(save: Save) -> None:
    first, _ = save(4)
    assert isinstance(first, Path)
    (first / "mark").write_text("")
    assert save(4, num_ranks=3) == [first] * 3
    assert not (first / "mark").exists() and find_faults(first) == []
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_reading_names_what_is_missing(save: Save) -> None:
    path, _ = save(4)
    assert isinstance(path, Path)
    with CheckpointReader(path) as reader:
        assert reader.optimizer_tensors("first") == ["exp_avg", "exp_avg_sq"]
        with pytest.raises(RunError, match="has no optimizer state for third"):
            reader.optimizer_tensors("third")
        with pytest.raises(RunError, match="master of second has 4 of the 6 "):
            reader.read_range("master", "second", torch.empty(6), 0)
        assert reader.read_rank_tensor(0, "rng/cuda") is None
        assert reader.read_rank_tensors(1, "policy/") == {}  # rank 0 has them
    (path / "rank_00001.safetensors").write_bytes(b"short")
    with pytest.raises(RunError, match=r"rank_00001\.safetensors: cannot be read"):
        CheckpointReader(path)
