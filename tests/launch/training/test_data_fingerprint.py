"""Tests that fingerprints of shards without a manifest, which are stored in checkpoints, never change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedShardWriter
from data.source import TokenSource
from launch.training.data import fingerprint


@pytest.mark.parametrize(
    ("shard_tokens", "expected"),
    [
        ([10], "5e8e74123684ff58d553c257b01bc689"),
        ([32768], "c74d58b7aac0d1a54ec5de78fc7d1566"),
        ([50_000], "d573ef6da4ad6610a06d31120f22801a"),
        ([9_000_000], "20447053d278f15a1ad87c9439b8c811"),
        ([10, 50_000, 0], "aa080f57cdb1baf3b402ac2552b74101"),
    ],
)
def test_shard_fingerprints_do_not_change_between_versions(
    tmp_path: Path, shard_tokens: list[int], expected: str
) -> None:
    for number, num_tokens in enumerate(shard_tokens):
        with IndexedShardWriter(tmp_path / f"part_{number}", np.dtype("<u2")) as writer:
            ids = np.arange(num_tokens, dtype=np.uint64) * np.uint64(40503) % np.uint64(60_000)
            writer.add_document(ids.astype("<u2"))
    assert fingerprint(TokenSource.open(tmp_path)) == expected
