"""Derived figures: utilisation, stragglers, dropped records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.engine.step_report import StepReport
from launch.metrics.hardware import peak_flops
from launch.metrics.recorder import STRAGGLER_STEPS, StragglerWarnings, drop_records_after, slowest_rank, step_record


def report(**changes: object) -> StepReport:
    values: dict[str, object] = {
        "loss": 2.0,
        "z_loss": 0.0,
        "num_targets": 1000,
        "grad_norm": 1.0,
        "group_grad_norms": {"decay": 1.0},
        "step_applied": True,
        "bad_micro_batches": (None, None),
        "forward_seconds": (1.0, 1.0),
        "data_seconds": (0.0, 0.1),
        "memory_bytes": (1e9, 2e9),
        "stop_requested": False,
    }
    return StepReport(**{**values, **changes})  # type: ignore[arg-type]


def record(step: int = 5, peak: float | None = None, **changes: object) -> dict[str, object]:
    rates = {"decay": 0.1, "query_key": 0.01}
    return step_record(step, 5000, report(**changes), rates, 0.5, 1000, peak, flops_per_token=1e9, num_ranks=2)


def test_utilisation_by_hand() -> None:
    # 1,000 tokens in half a second at 1e9 FLOPs each, on two devices of 10e12 FLOP/s.
    assert record(peak=10e12)["mfu"] == pytest.approx(2e12 / 20e12)
    assert record(peak=None)["mfu"] is None
    assert record()["tokens"] == 5000


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("Tesla V100-SXM2-32GB", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_peaks_are_the_published_dense_ones(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_the_slowest_rank_stands_out_from_the_median() -> None:
    assert slowest_rank((1.0, 1.1, 1.0, 1.05)) is None
    assert slowest_rank((1.0, 1.5, 1.0, 1.05)) == 1
    assert slowest_rank((1.0, 1.5)) == 1
    assert slowest_rank((0.001, 0.002)) is None  # a millisecond is noise
    assert slowest_rank((1.0,)) is None


def test_a_straggler_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = StragglerWarnings()
    for step in range(4 * STRAGGLER_STEPS):
        watch.update(step, (1.0, 2.0))
    assert len(caplog.messages) == 1
    assert "rank 1 is slow: its forward passes took 2.000 s per step" in caplog.messages[0]
    for step in range(2 * STRAGGLER_STEPS):
        watch.update(step, (1.5 + step % 2, 1.0 + step % 2))
    assert len(caplog.messages) == 2


def test_a_few_slow_steps_are_not_a_straggler(caplog: pytest.LogCaptureFixture) -> None:
    watch = StragglerWarnings()
    for step in range(4 * STRAGGLER_STEPS):
        watch.update(step, (3.0, 1.0) if step % 2 else (1.0, 3.0))
    assert caplog.messages == []
    for step in range(STRAGGLER_STEPS):
        watch.update(step, (3.0, 1.0))
    (message,) = caplog.messages
    assert "rank 0 is slow" in message


def test_records_beyond_a_step_and_cut_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo')
    drop_records_after(path, 3)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    drop_records_after(tmp_path / "absent.jsonl", 3)
