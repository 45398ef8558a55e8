"""Parts of the engine that need no process group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launch.distributed.process_group import local_device
from launch.distributed.topology import Topology
from launch.engine.step_report import PendingReport
from launch.engine.timing import Stopwatch
from launch.errors import RunError


def row(
    loss_sum: float,
    grad_norm: float,
    squares: tuple[float, float],
    applied: float = 1,
    stop: float = 0,
    bad_micro_batch: float = -1,
) -> list[float]:
    return [loss_sum, 0.0, 10.0, grad_norm, applied, stop, 0.5, 0.1, 1e9, bad_micro_batch, *squares]


def test_a_report_sums_over_ranks_and_undoes_clipping() -> None:
    # Two ranks with half of the squares each; the clipped norm is 5 and the one before clipping 10.
    rows = torch.tensor([row(30.0, 10.0, (4.5, 8.0)), row(50.0, 10.0, (4.5, 8.0))], dtype=torch.float64)
    report = PendingReport(rows, ["a", "b"], {}, {}, None, replicated=False).read()
    assert report.loss == 4.0
    assert report.num_targets == 20
    assert report.grad_norm == 10.0
    assert report.group_grad_norms == pytest.approx({"a": 6.0, "b": 8.0})
    assert report.bad_ranks == []
    assert report.step_applied
    assert not report.stop_requested


def test_replicated_squares_count_once() -> None:
    rows = torch.tensor([row(30.0, -1.0, (9.0, 16.0))] * 2, dtype=torch.float64)
    report = PendingReport(rows, ["a", "b"], {}, {}, None, replicated=True).read()
    assert report.grad_norm == pytest.approx(5.0)
    assert report.group_grad_norms == pytest.approx({"a": 3.0, "b": 4.0})


def test_a_rank_without_finite_loss_is_named_and_one_request_stops_all() -> None:
    rows = torch.tensor(
        [
            row(1.0, float("inf"), (0.0, 0.0), applied=0),
            row(float("nan"), float("inf"), (0.0, 0.0), stop=1, bad_micro_batch=2),
        ],
        dtype=torch.float64,
    )
    report = PendingReport(rows, ["a", "b"], {}, {}, None, replicated=False).read()
    assert report.bad_micro_batches == (None, 2)
    assert report.bad_ranks == [1]
    assert not report.step_applied
    assert report.stop_requested


def test_a_lone_visible_gpu_is_this_ranks() -> None:
    topology = Topology("torch", 3, 4, 3, 4, 0, "127.0.0.1", 1)
    assert local_device(topology, num_visible=1) == 0
    assert local_device(topology, num_visible=8) == 3
    # The same words from every rank: the preflight prints them once.
    with pytest.raises(RunError, match="4 ranks were started here, but this node shows 2 GPUs; start one rank for"):
        local_device(replace(topology, local_rank=0), num_visible=2)


def test_a_stopwatch_adds_intervals_and_starts_again() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(3):
        watch.start()
        watch.stop()
    assert 0 < watch.take() < 1
    assert watch.take() == 0
