"""Shared by the tests of launch/: logging without traces of earlier tests, and small checkpoints without DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from launch.checkpoint.files import TrainingState
from launch.checkpoint.save import optimizer_scalars, optimizer_tensor_kinds, save_checkpoint
from tests.launch.helpers.fake_engine import SHAPES, FakeEngine
from tests.launch.helpers.threaded_ranks import on_ranks


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


def state_of(engine: FakeEngine, step: int) -> TrainingState:
    """The state that goes with an engine."""
    return TrainingState(
        step=step,
        consumed_samples=8 * step,
        num_ranks=engine.world_size,
        zero_stage=1,
        parameters={name: list(shape) for name, shape in SHAPES.items()},
        groups={"decay": list(SHAPES)},
        optimizer_tensors=optimizer_tensor_kinds(engine),  # type: ignore[arg-type]
        optimizer_scalars=optimizer_scalars(engine),  # type: ignore[arg-type]
        data_fingerprints=[],
        tokenizer_sha256="a" * 64,
        tokenizer_file="tokenizer.model",
        loss=2.0,
        policy_state=engine.policy[0],
    )


Save = Callable[..., list[Path | Exception]]


@pytest.fixture
def save(tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """Saves the checkpoint of a step on some ranks, in `tmp_path / "run/checkpoints"`; what each returned or raised.

    Other keyword arguments change its `TrainingState`.
    """
    (tmp_path / "run").mkdir()
    tokenizer = tmp_path / "tokenizer"
    tokenizer.write_bytes(b"a tokenizer")
    config = load_config(tiny_config)

    def run(step: int, num_ranks: int = 2, is_replicated: bool = False, **changes: Any) -> list[Path | Exception]:
        def one(rank: int) -> Path:
            engine = FakeEngine(rank, num_ranks, is_replicated).fill()
            return save_checkpoint(
                tmp_path / "run/checkpoints",
                engine,  # type: ignore[arg-type]
                config,
                replace(state_of(engine, step), **changes),
                tokenizer,
            )

        return on_ranks(monkeypatch, num_ranks, one)

    return run
