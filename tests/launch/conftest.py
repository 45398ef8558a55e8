"""Isolation of the tests of launch/ from each other."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def plain_logging() -> Iterator[None]:
    """Each test begins with a `launch` logger that `caplog` sees, whatever a command did to it in an earlier one."""
    logger = logging.getLogger("launch")
    saved = logger.level, logger.propagate, list(logger.handlers)
    logger.setLevel(logging.INFO)
    logger.propagate = True
    logger.handlers.clear()
    yield
    logger.level, logger.propagate, logger.handlers = saved
