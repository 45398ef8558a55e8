"""The report of a step: one row of named columns from each rank, gathered on the device and read on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from launch.attention_control.monitor import AttentionReport
from launch.engine.anomalies import Anomaly

# Columns whose values the host knows when it builds the row, and columns whose values are on the device.
HOST_COLUMNS = ("num_targets", "is_applied", "stop_requested", "forward_seconds", "data_seconds", "memory_bytes")
DEVICE_COLUMNS = ("loss_sum", "z_sum", "grad_norm", "bad_micro_batch")
NO_NORM = -1.0  # the value of grad_norm if DeepSpeed computes no norm (stage 0)


@dataclass(frozen=True)
class StepReport:
    """What all ranks measured in one step.

    Attributes:
        loss: Cross-entropy in nats per target token, over the global batch.
        z_loss: Mean squared logsumexp of the logits, unweighted; reported even if it is not part of the objective.
        num_targets: The number of target tokens in the global batch.
        grad_norm: Global gradient norm before clipping.
        group_grad_norms: Gradient norm of every parameter group before clipping.
        step_applied: Whether the optimizer changed the weights.
        bad_micro_batches: For each rank, the index of its first micro-batch with a non-finite loss; None if there was
            none.
        forward_seconds: For each rank, the time of the forward passes, usually of the previous step.
        data_seconds: For each rank, how long it waited for its batch.
        memory_bytes: For each rank, the peak of allocated memory on a GPU, or resident memory on a CPU.
        stop_requested: Whether any rank was asked to stop.
        qk_statistics: Statistics of query/key control by name, flattened; see `QueryKeyControl.statistics`.
        qk_record: What the policy adds to the record of the step.
        attention: The measurement of attention around the step, if one was due and this rank records it.
        was_checked: Whether the anomaly policy checked the step before it was applied.
        anomaly: The anomaly that this check found, if any.
    """

    loss: float
    z_loss: float
    num_targets: int
    grad_norm: float
    group_grad_norms: dict[str, float]
    step_applied: bool
    bad_micro_batches: tuple[int | None, ...]
    forward_seconds: tuple[float, ...]
    data_seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    stop_requested: bool
    qk_statistics: dict[str, list[float]] = field(default_factory=dict)
    qk_record: dict[str, Any] = field(default_factory=dict)
    attention: AttentionReport | None = None
    was_checked: bool = False
    anomaly: Anomaly | None = None

    @property
    def bad_ranks(self) -> list[int]:
        """The ranks with a non-finite loss."""
        return [rank for rank, micro_batch in enumerate(self.bad_micro_batches) if micro_batch is not None]


@dataclass(frozen=True)
class StepValues:
    """What one rank contributes to the report of a step.

    Attributes:
        host: The value of every host column.
        device: The value of every device column, a tensor of one element; `grad_norm` defaults to `NO_NORM`.
        squared_norms: This rank's squared gradient norm of every parameter group, as the optimizer saw it.
        statistics: Tensors that are the same on all ranks, by name.
        qk_record, attention, was_checked, anomaly: See `StepReport`.
    """

    host: Mapping[str, float]
    device: Mapping[str, Tensor]
    squared_norms: Mapping[str, Tensor | float]
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    qk_record: dict[str, Any] = field(default_factory=dict)
    attention: AttentionReport | None = None
    was_checked: bool = False
    anomaly: Anomaly | None = None


class PendingReport:
    """The gathered rows of a step, while they are copied to the host.

    Args:
        rows: One row per rank; see `column_names`.
        values: This rank's contribution.
        is_replicated: Whether every rank holds all gradients (ZeRO stage 0).
    """

    def __init__(self, rows: Tensor, values: StepValues, is_replicated: bool) -> None:
        self._values = values
        self._is_replicated = is_replicated
        self._event: torch.cuda.Event | None = None
        if rows.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            rows = host
        self._rows = rows

    def read(self) -> StepReport:
        """Waits for the copy and returns the report. One step later the copy has usually finished."""
        if self._event is not None:
            self._event.synchronize()
        columns = dict(zip(column_names(self._values), zip(*self._rows.tolist(), strict=True), strict=True))
        num_targets = int(sum(columns["num_targets"]))
        grad_norm, group_norms = self._norms(columns)
        return StepReport(
            loss=sum(columns["loss_sum"]) / max(num_targets, 1),
            z_loss=sum(columns["z_sum"]) / max(num_targets, 1),
            num_targets=num_targets,
            grad_norm=grad_norm,
            group_grad_norms=group_norms,
            step_applied=all(columns["is_applied"]),
            bad_micro_batches=tuple(None if index < 0 else int(index) for index in columns["bad_micro_batch"]),
            forward_seconds=columns["forward_seconds"],
            data_seconds=columns["data_seconds"],
            memory_bytes=columns["memory_bytes"],
            stop_requested=any(columns["stop_requested"]),
            qk_statistics={
                name: [columns[f"{name}/{index}"][0] for index in range(values.numel())]
                for name, values in self._values.statistics.items()
            },
            qk_record=self._values.qk_record,
            attention=self._values.attention,
            was_checked=self._values.was_checked,
            anomaly=self._values.anomaly,
        )

    def _norms(self, columns: Mapping[str, Sequence[float]]) -> tuple[float, dict[str, float]]:
        """The gradient norms before clipping: the global one, and that of every group."""
        copies = len(self._rows) if self._is_replicated else 1
        groups = {name: math.sqrt(sum(columns[f"squared_norm/{name}"]) / copies) for name in self._values.squared_norms}
        total = math.sqrt(sum(norm**2 for norm in groups.values()))
        # From stage 1 on, the optimizer sees clipped gradients, and DeepSpeed reports the norm before clipping.
        # At stage 0 DeepSpeed reports none, and the squares are taken before clipping.
        reported = columns["grad_norm"][0]
        grad_norm = reported if reported >= 0 or math.isnan(reported) else total
        unclip = grad_norm / total if total > 0 else 1.0
        if not math.isfinite(grad_norm):
            unclip = math.nan
        return grad_norm, {name: norm * unclip for name, norm in groups.items()}


def column_names(values: StepValues) -> list[str]:
    """The columns of a row, in order; the same on all ranks."""
    return [
        *HOST_COLUMNS,
        *DEVICE_COLUMNS,
        *(f"squared_norm/{name}" for name in values.squared_norms),
        *(f"{name}/{index}" for name, tensor in values.statistics.items() for index in range(tensor.numel())),
    ]


def gather_report(values: StepValues, device: torch.device, is_replicated: bool) -> PendingReport:
    """Sends this rank's values to all ranks without waiting for the device. Collective."""
    row = encode_row(values, device)
    rows = row.new_empty(dist.get_world_size() * row.numel())
    dist.all_gather_into_tensor(rows, row)
    return PendingReport(rows.view(-1, row.numel()), values, is_replicated)


def encode_row(values: StepValues, device: torch.device) -> Tensor:
    """One rank's row, fp64 [columns], on the device."""
    on_device = {**values.device, **{f"squared_norm/{name}": value for name, value in values.squared_norms.items()}}
    names = [*HOST_COLUMNS, *DEVICE_COLUMNS, *(f"squared_norm/{name}" for name in values.squared_norms)]
    defaults = {**dict.fromkeys(names, 0.0), "grad_norm": NO_NORM, **values.host}
    row = torch.tensor([defaults[name] for name in names], dtype=torch.float64, pin_memory=device.type == "cuda")
    row = row.to(device, non_blocking=True)
    for column, name in enumerate(names):
        if name in on_device:
            row[column] = on_device[name]
    return torch.cat([row, *(tensor.flatten() for tensor in values.statistics.values())])
