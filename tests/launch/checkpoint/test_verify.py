"""Ranks share the verification and agree on the newest undamaged checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.checkpoint import verify
from launch.checkpoint.verify import newest_undamaged, shared_faults
from tests.launch.conftest import Save
from tests.launch.helpers.threaded_ranks import on_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_damaged_checkpoints_are_named_and_passed_over(
    num_ranks: int, save: Save, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [path for step in (12, 8, 4) for path in save(step)[:1] if isinstance(path, Path)]

    def choose(rank: int) -> Path | None:
        return newest_undamaged(paths, rank, num_ranks)

    assert on_ranks(monkeypatch, num_ranks, choose) == [paths[0]] * num_ranks
    assert caplog.messages == []
    (paths[0] / "rank_00001.safetensors").unlink()
    assert on_ranks(monkeypatch, num_ranks, choose) == [paths[1]] * num_ranks
    assert len(caplog.messages) == num_ranks
    assert all(f"{paths[0]}/rank_00001.safetensors: is missing" in message for message in caplog.messages)
    for path in paths[1:]:
        (path / "manifest.json").unlink()
    assert on_ranks(monkeypatch, num_ranks, choose) == [None] * num_ranks
    assert on_ranks(monkeypatch, num_ranks, lambda rank: newest_undamaged([], rank, num_ranks)) == [None] * num_ranks


def test_every_file_is_read_by_one_rank_and_every_fault_reaches_all(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(4)[0]
    assert isinstance(path, Path)
    for name in ("rank_00000.safetensors", "rank_00001.safetensors", "config.yaml"):
        (path / name).unlink()
    found: list[list[str]] = []
    find = verify.find_faults

    def record(*arguments: object) -> list[str]:
        found.append(find(*arguments))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(verify, "find_faults", record)
    outcomes = on_ranks(monkeypatch, 2, lambda rank: shared_faults(path, rank, 2))
    assert len(outcomes[0]) == 3 and outcomes[0] == outcomes[1]
    assert sorted(line for part in found for line in part) == sorted(outcomes[0])
