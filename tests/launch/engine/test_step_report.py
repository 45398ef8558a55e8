"""A step's report: encoded, gathered and read without DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist

from launch.engine.step_report import PendingReport, StepValues, column_names, encode_row, gather_report

CPU = torch.device("cpu")


def values(
    loss_sum: float = 30.0,
    grad_norm: float | None = 10.0,
    squares: tuple[float, float] = (4.5, 8.0),
    bad_micro_batch: float = -1.0,
    is_applied: float = 1.0,
    stop_requested: float = 0.0,
    **more: Any,
) -> StepValues:
    """What one rank measured, with ten target tokens and two parameter groups."""
    host = {"num_targets": 10.0, "is_applied": is_applied, "stop_requested": stop_requested}
    host |= {"forward_seconds": 0.5, "data_seconds": 0.1, "memory_bytes": 1e9}
    device = {"loss_sum": loss_sum, "z_sum": loss_sum / 10, "bad_micro_batch": bad_micro_batch}
    if grad_norm is not None:
        device["grad_norm"] = grad_norm
    squared_norms = dict(zip("ab", squares, strict=True))
    return StepValues(host, {name: torch.tensor(value) for name, value in device.items()}, squared_norms, **more)


def pending(ranks: list[StepValues], is_replicated: bool = False) -> PendingReport:
    """The report of rank 0, from the rows of all ranks."""
    return PendingReport(torch.stack([encode_row(one, CPU) for one in ranks]), ranks[0], is_replicated)


@pytest.fixture
def lone_rank() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_report_sums_over_ranks_and_undoes_clipping() -> None:
    # Two ranks with half of the squares each; the clipped norm is 5 and the one before clipping 10.
    report = pending([values(30.0), values(50.0)]).read()
    assert report.loss == 4.0
    assert report.z_loss == pytest.approx(0.4)
    assert report.num_targets == 20
    assert report.grad_norm == 10.0
    assert report.group_grad_norms == pytest.approx({"a": 6.0, "b": 8.0})
    assert report.bad_ranks == []
    assert report.step_applied
    assert not report.stop_requested
    assert (report.forward_seconds, report.data_seconds, report.memory_bytes) == ((0.5,) * 2, (0.1,) * 2, (1e9,) * 2)


def test_replicated_squares_count_once() -> None:
    """At stage 0 DeepSpeed reports no norm, and every rank has the whole gradient."""
    report = pending([values(grad_norm=None, squares=(9.0, 16.0))] * 2, is_replicated=True).read()
    assert report.grad_norm == pytest.approx(5.0)
    assert report.group_grad_norms == pytest.approx({"a": 3.0, "b": 4.0})


def test_a_rank_without_finite_loss_is_named_and_one_request_stops_all() -> None:
    bad = values(math.nan, math.inf, bad_micro_batch=2.0, stop_requested=1.0)
    report = pending([values(1.0, math.inf, is_applied=0.0), bad]).read()
    assert report.bad_micro_batches == (None, 2)
    assert report.bad_ranks == [1]
    assert math.isnan(report.loss)
    assert report.grad_norm == math.inf and all(map(math.isnan, report.group_grad_norms.values()))
    assert not report.step_applied
    assert report.stop_requested


def test_a_batch_without_targets_has_a_loss_of_zero() -> None:
    without = values(0.0)
    without.host["num_targets"] = 0.0  # type: ignore[index]
    assert pending([without]).read().loss == 0.0


def test_a_lone_rank_reads_what_it_gathered(lone_rank: None) -> None:
    statistics = {"norms": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64), "max": torch.tensor([5.0])}
    mine = values(statistics=statistics, qk_record={"alpha": 0.5}, was_checked=True)
    row = encode_row(mine, CPU)
    names = column_names(mine)
    assert row.dtype == torch.float64 and row.shape == (len(names),)
    columns = dict(zip(names, row.tolist(), strict=True))
    assert columns["loss_sum"] == 30.0 and columns["squared_norm/b"] == 8.0 and columns["norms/3"] == 4.0
    report = gather_report(mine, CPU, is_replicated=False).read()
    assert report.loss == 3.0
    assert report.qk_statistics == {"norms": [1.0, 2.0, 3.0, 4.0], "max": [5.0]}
    assert report.qk_record == {"alpha": 0.5} and report.was_checked and report.anomaly is None
