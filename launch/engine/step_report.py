"""What the ranks report of a step: one row of numbers each, gathered on the device and read on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from launch.attention_control.monitor import AttentionReport
from launch.engine.anomalies import Fault

NUM_FIXED_COLUMNS = 10  # columns of a rank's report before the groups' squared gradient norms


@dataclass(frozen=True)
class StepReport:
    """What all ranks measured in one step.

    Attributes:
        loss: cross-entropy in nats per target token, over the whole global batch.
        z_loss: mean squared logsumexp of the logits, unweighted, also when it is not part of the objective.
        num_targets: target tokens of the global batch.
        grad_norm: global gradient norm before clipping; group_grad_norms: the same for every parameter group.
        step_applied: whether the optimizer changed the weights.
        verdicts: of the judge, where it was asked before the step was applied.
        bad_micro_batches: of each rank, the first micro-batch whose loss was not finite; None: all were.
        forward_seconds, data_seconds: per rank; the forward time is that of the step before.
        memory_bytes: per rank; allocated peak on GPU, resident on CPU.
        stop_requested: whether any rank was asked to stop.
        qk_statistics: of query/key control, by name, flattened; see `QueryKeyControl.statistics`.
        qk_record: what the policy itself reports of the step.
        attention: measured around the step, where it was due; on the ranks that compute it.
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
    verdicts: tuple[Fault | None, ...] = ()

    @property
    def bad_ranks(self) -> list[int]:
        """Ranks whose own loss was not finite."""
        return [rank for rank, micro_batch in enumerate(self.bad_micro_batches) if micro_batch is not None]


class PendingReport:
    """The gathered rows of a step on their way to the host.

    Attributes:
        verdicts: see `StepReport`.
    """

    def __init__(
        self,
        rows: Tensor,
        group_names: list[str],
        qk_widths: dict[str, int],
        qk_record: dict[str, Any],
        attention: AttentionReport | None,
        replicated: bool,
    ) -> None:
        self.verdicts: list[Fault | None] = []
        self._attention = attention
        self._group_names = group_names
        self._qk_widths = qk_widths
        self._qk_record = qk_record
        self._replicated = replicated
        self._event: torch.cuda.Event | None = None
        if rows.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            rows = host
        self._rows = rows

    def read(self) -> StepReport:
        """Waits for the copy (done long ago when read one step late)."""
        if self._event is not None:
            self._event.synchronize()
        rows = self._rows.tolist()
        loss_sum, z_sum, num_targets, grad_norm, applied, stop, forward, data, memory, bad, *rest = zip(
            *rows, strict=True
        )
        squares = rest[: len(self._group_names)]
        qk_values = iter([column[0] for column in rest[len(self._group_names) :]])
        targets = int(sum(num_targets))
        copies = len(rows) if self._replicated else 1
        clipped = [math.sqrt(sum(column) / copies) for column in squares]
        total = math.sqrt(sum(norm**2 for norm in clipped))
        # From stage 1 on, the optimizer sees clipped gradients, and DeepSpeed's norm is the one before clipping.
        # Where it has none (-1), at stage 0, the squares are those before clipping.
        global_norm = grad_norm[0] if grad_norm[0] >= 0 or math.isnan(grad_norm[0]) else total
        unclip = global_norm / total if total > 0 else 1.0
        if not math.isfinite(global_norm):
            unclip = math.nan
        return StepReport(
            loss=sum(loss_sum) / max(targets, 1),
            z_loss=sum(z_sum) / max(targets, 1),
            num_targets=targets,
            grad_norm=global_norm,
            group_grad_norms={name: norm * unclip for name, norm in zip(self._group_names, clipped, strict=True)},
            step_applied=all(applied),
            bad_micro_batches=tuple(None if index < 0 else int(index) for index in bad),
            forward_seconds=forward,
            data_seconds=data,
            memory_bytes=memory,
            stop_requested=any(stop),
            qk_statistics={name: list(islice(qk_values, width)) for name, width in self._qk_widths.items()},
            qk_record=self._qk_record,
            attention=self._attention,
            verdicts=tuple(self.verdicts),
        )
