"""Damage is found and named, whatever it is; a user's path finds the checkpoint that it means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.checkpoint.files import MANIFEST, STATE, find_checkpoint, find_faults, read_config, read_state
from launch.errors import RunError
from tests.launch.conftest import Save


@pytest.fixture
def checkpoint(save: Save) -> Path:
    path, _ = save(4)
    assert isinstance(path, Path)
    return path


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("name", "damage", "fault"),
    [
        ("rank_00001.safetensors", flip_last_bit, "rank_00001.safetensors: its content does not match its hash"),
        ("rank_00001.safetensors", Path.unlink, "rank_00001.safetensors: is missing"),
        ("config.yaml", lambda path: path.write_text("x"), "config.yaml: has 1 bytes, expected "),
        (STATE, flip_last_bit, "state.json: its content does not match its hash"),
        (MANIFEST, Path.unlink, "manifest.json: is missing"),
        (MANIFEST, lambda path: path.write_text("{"), "manifest.json: cannot be read: "),
        (MANIFEST, lambda path: path.write_bytes(b"\xff"), "manifest.json: cannot be read: "),
        (MANIFEST, lambda path: path.write_text('{"files": {}}'), "manifest.json: does not list the files of a"),
        (MANIFEST, lambda path: path.write_text("[]"), "manifest.json: does not list the files of a"),
    ],
)
def test_a_damaged_file_is_the_one_fault(
    name: str, damage: Callable[[Path], object], fault: str, checkpoint: Path
) -> None:
    assert find_faults(checkpoint) == []
    damage(checkpoint / name)
    (line,) = find_faults(checkpoint)
    assert line.startswith(f"{checkpoint}/{fault}"), line


def test_sizes_alone_do_not_show_a_flipped_bit(checkpoint: Path) -> None:
    flip_last_bit(checkpoint / "rank_00000.safetensors")
    assert find_faults(checkpoint, check_hashes=False) == []
    assert len(find_faults(checkpoint)) == 1


def test_a_manifest_entry_needs_size_and_hash(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest["files"][STATE]["xxh3_128"]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    assert find_faults(checkpoint) == [f"{checkpoint}/manifest.json: the entry of state.json has no size and hash"]


def test_the_state_is_read_back_and_other_versions_are_refused(checkpoint: Path) -> None:
    state = read_state(checkpoint)
    assert (state.step, state.consumed_samples, state.num_ranks) == (4, 32, 2)
    assert state.optimizer_scalars == {"step": 7.0} and state.optimizer_tensors == ["exp_avg", "exp_avg_sq"]
    assert read_config(checkpoint).run.name == "tiny"
    values = json.loads((checkpoint / STATE).read_text())
    (checkpoint / STATE).write_text(json.dumps({**values, "format_version": 2}))
    with pytest.raises(RunError, match=r"state\.json: has format version 2; expected 1"):
        read_state(checkpoint)
    (checkpoint / STATE).write_text(json.dumps({**values, "surprise": 1}))
    with pytest.raises(RunError, match=r"state\.json: is not a checkpoint's state: .*surprise"):
        read_state(checkpoint)


def test_a_path_means_a_checkpoint_or_the_newest_of_a_run(save: Save, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RunError, match="no checkpoint found"):
        find_checkpoint(run)
    save(4)
    save(12)
    save(8)
    assert find_checkpoint(run) == run / "checkpoints/step_00000012"
    assert find_checkpoint(run / "checkpoints") == run / "checkpoints/step_00000012"
    assert find_checkpoint(run / "checkpoints/step_00000008") == run / "checkpoints/step_00000008"
    with pytest.raises(RunError, match="nothing: no such checkpoint or run folder"):
        find_checkpoint(tmp_path / "nothing")
