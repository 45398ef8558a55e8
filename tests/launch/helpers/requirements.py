"""What a test needs besides the Python packages of the dev extra."""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest

OPTIONAL_PACKAGES = ("lm_eval",)  # heavy, and not among the dev packages: their tests are skipped in CI, too


def cannot_run(reason: str) -> NoReturn:
    """Skips a test where something is missing; where `CI` is `true`, everything must be there and the test fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, and this cannot be tested here: {reason}", pytrace=False)
    pytest.skip(reason)


def require(reason: str | None) -> None:
    """Does not run a test for which there is such a reason."""
    if reason is not None:
        cannot_run(reason)


def require_optional_package(name: str) -> None:
    """Skips a test without a package of `OPTIONAL_PACKAGES`, wherever it runs."""
    assert name in OPTIONAL_PACKAGES
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is optional and not installed")
