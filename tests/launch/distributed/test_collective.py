"""Agreements between ranks: three real processes of one gloo group."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.distributed.collective import is_lost_contact
from tests.conftest import ROOT, preloaded_ranks

NUM_RANKS = 3
SCRIPT = f"""
import json, os, sys
from datetime import timedelta
from torch import distributed as dist
sys.path.insert(0, {str(ROOT)!r})
from launch.distributed.collective import on_all_ranks, on_main_rank, share
from launch.errors import SharedError

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()

def fail(*ranks, text="rank {{}} has no disk", kind=OSError):
    if rank in ranks:
        raise kind(text.format(rank))
    return rank

def attempt(function):
    try:
        return function()
    except SharedError as error:
        return f"SharedError: {{error}}"

outcomes = {{
    "share": share({{"rank": rank}}),
    "main": on_main_rank(lambda: f"from rank {{rank}}"),
    "main fails": attempt(lambda: on_main_rank(lambda: fail(0, 1, 2))),
    "only main runs": attempt(lambda: on_main_rank(lambda: fail(1, 2))),
    "all": on_all_ranks(lambda: 10 * rank),
    "one fails": attempt(lambda: on_all_ranks(lambda: fail(1))),
    "two fail": attempt(lambda: on_all_ranks(lambda: fail(0, 2, text="disk full", kind=ValueError))),
    "all fail alike": attempt(lambda: on_all_ranks(lambda: fail(0, 1, 2, text="no such file", kind=RuntimeError))),
    "two lines": attempt(lambda: on_all_ranks(lambda: fail(1, text="first\\nsecond"))),
}}
with open(f"{{sys.argv[1]}}.{{rank}}", "w") as stream:
    json.dump(outcomes, stream)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """The outcome of a case on every rank."""
    folder = tmp_path_factory.mktemp("collective")
    (folder / "script.py").write_text(SCRIPT)
    preloaded_ranks(NUM_RANKS, folder / "script.py", folder / "outcomes")
    ranks = [json.loads(Path(f"{folder}/outcomes.{rank}").read_text()) for rank in range(NUM_RANKS)]
    return lambda case: [rank[case] for rank in ranks]


def test_every_rank_gets_every_value_in_rank_order(outcomes: Callable[[str], list[Any]]) -> None:
    assert outcomes("share") == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * NUM_RANKS


def test_rank_0_runs_once_for_all(outcomes: Callable[[str], list[Any]]) -> None:
    assert outcomes("main") == ["from rank 0"] * NUM_RANKS
    assert outcomes("only main runs") == [0] * NUM_RANKS


def test_a_failure_on_rank_0_is_raised_on_every_rank(outcomes: Callable[[str], list[Any]]) -> None:
    assert outcomes("main fails") == ["SharedError: rank 0 has no disk"] * NUM_RANKS


def test_each_rank_gets_its_own_result(outcomes: Callable[[str], list[Any]]) -> None:
    assert outcomes("all") == [0, 10, 20]


def test_a_failure_on_any_rank_is_raised_on_every_rank_with_its_ranks(outcomes: Callable[[str], list[Any]]) -> None:
    assert outcomes("one fails") == ["SharedError: rank 1: rank 1 has no disk"] * NUM_RANKS
    assert outcomes("two fail") == ["SharedError: rank 0, 2: disk full"] * NUM_RANKS
    assert outcomes("all fail alike") == ["SharedError: no such file"] * NUM_RANKS
    assert outcomes("two lines") == ["SharedError: rank 1: first\nrank 1: second"] * NUM_RANKS


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4321", True),
        ("recv: Connection reset", True),
        ("NCCL error: unhandled system error", True),
        ("size mismatch for blocks.0.attention.query.weight", False),
    ],
)
def test_lost_contact_is_told_from_other_errors(text: str, is_lost: bool) -> None:
    assert is_lost_contact(RuntimeError(text)) == is_lost
