"""A missing package skips a test on a developer's machine and fails it in CI."""

from __future__ import annotations

import pytest

from tests.launch.helpers.requirements import require


def test_a_missing_package_skips_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    require(None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no SLURM"):
        require("no SLURM")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI=true, and this cannot be tested here: no SLURM"):
        require("no SLURM")
