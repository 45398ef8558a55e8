"""A run that hangs ends by itself, writes where it hangs, and is restarted by a supervisor."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from configs.schema import WatchdogConfig
from launch.process import watchdog
from launch.process.rank_status import is_alive
from launch.process.watchdog import Watchdog
from tests.conftest import finish, read_metrics, start
from tests.launch.helpers.supervised import supervisor_command, wait_for_end, wait_for_ranks, wait_for_steps


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the watchdog would end the process, which polls often here and blocks its thread instead."""
    ended = threading.Event()

    def end(code: int) -> None:
        assert code == 1
        ended.set()
        threading.Event().wait()  # forever, in a daemon thread

    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "SETTLE_SECONDS", 0.1)
    return ended


def dog(tmp_path: Path, min_seconds: float | None = 0.2, slow_seconds: float = 100.0) -> Watchdog:
    settings = WatchdogConfig(min_seconds=min_seconds, step_factor=20.0, slow_seconds=slow_seconds)
    return Watchdog(settings, tmp_path / "stacks.txt", rank=3)


def test_no_progress_ends_the_process_with_the_stacks_of_all_threads(tmp_path: Path, ends: threading.Event) -> None:
    with dog(tmp_path) as watch:
        watch.step_finished(7)
        watch.step_finished(8)
        begin = time.monotonic()
        assert ends.wait(20)
        assert time.monotonic() - begin >= 0.2
    text = (tmp_path / "stacks.txt").read_text()
    header = text.splitlines()[0]
    assert header.startswith("rank 3, host ") and f"process {os.getpid()}, step 8, " in header
    assert "test_no_progress_ends_the_process" in text  # where the main thread is
    assert text.count("hread 0x") >= 3  # it, the watchdog and its reporter


def test_the_start_and_slow_work_have_their_own_limit(tmp_path: Path, ends: threading.Event) -> None:
    with dog(tmp_path) as watch:
        assert watch.limit_seconds() == 100
        watch.step_finished(1)
        assert watch.limit_seconds() == 100  # no step was timed so far
        time.sleep(0.05)
        watch.step_finished(2)
        assert 1.0 <= watch.limit_seconds() < 10  # 20 times the median step
        with watch.slow_work():
            assert watch.limit_seconds() == 100
        time.sleep(0.1)
        watch.step_finished(3)
        assert watch.limit_seconds() < 10
        watch.expect_slow_start()
        assert watch.limit_seconds() == 100
        watch.step_finished(4)
        assert watch.limit_seconds() == 100
    assert not ends.is_set()


def test_a_run_that_continues_in_time_is_not_ended(
    tmp_path: Path, ends: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "SETTLE_SECONDS", 1.0)
    with dog(tmp_path) as watch:
        watch.step_finished(1)
        watch.step_finished(2)
        end = time.monotonic() + 20
        while not (tmp_path / "stacks.txt").exists() and time.monotonic() < end:
            time.sleep(0.01)
        for step in range(3, 300):
            watch.step_finished(step)
            time.sleep(0.005)
    assert not ends.is_set()


def test_null_switches_it_off(tmp_path: Path) -> None:
    before = threading.active_count()
    with dog(tmp_path, min_seconds=None) as watch:
        watch.step_finished(1)
        with watch.slow_work():
            pass
        assert threading.active_count() <= before


@pytest.mark.slow
def test_a_suspended_rank_ends_the_group_and_the_run_is_restarted(tiny_config: Path, tmp_path: Path) -> None:
    """After SIGSTOP rank 1 can write nothing, and only SIGKILL ends it."""
    folder = tmp_path / "runs/tiny"
    settings = ["train.steps=100000", "checkpoint.every_steps=10", "watchdog.min_seconds=5"]
    process = start(supervisor_command("torchrun", 2, tiny_config, *settings, restarts=1))
    ranks = wait_for_ranks(process, 2)
    wait_for_steps(process, folder, 12)
    ranks[1].suspend()
    assert wait_for_end([ranks[0]]) < 40
    text = (folder / "stacks_rank_0.txt").read_text()
    assert text.startswith("rank 0, host ")
    assert "in train_step" in text  # of the main thread
    assert not (folder / "stacks_rank_1.txt").exists()

    again = wait_for_ranks(process, 2, other_than=ranks)
    assert not any(map(is_alive, ranks.values()))
    wait_for_steps(process, folder, 30)
    process.send_signal(signal.SIGTERM)
    finished = finish(process, timeout=120)
    assert finished.code == 75, finished.output + finished.errors
    assert "the run hangs: no progress for" in finished.output
    assert "restart 1 of 1" in finished.output
    assert not any(map(is_alive, again.values()))
    steps = [record["step"] for record in read_metrics(folder)]
    assert steps == list(range(1, len(steps) + 1))
