"""Attention statistics of every head during training, measured around one step on the probe batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launch.attention_control.head_weights import UpdateMeter
from launch.attention_control.probe import Probe
from model.diagnostics.weights import head_statistics, mean_change, sampled_attention
from model.stability.drift import sampled_logits

SET_SIZES = (4, 16, 64)  # the values of N in the separability N_s / N


@dataclass(frozen=True)
class AttentionReport:
    """One measurement of attention.

    Attributes:
        heads: For each statistic, a table with one row of heads per layer: those of `head_statistics`, and
            `logit_change`, the mean |Δlogit| of the step.
        norms, update_ratios: For each query/key matrix, its Frobenius norm after the step, and ‖ΔW‖ / ‖W‖ of the step,
            one value per layer.
    """

    heads: dict[str, list[list[float]]]
    norms: dict[str, list[float]]
    update_ratios: dict[str, list[float]]


class AttentionMonitor:
    """Measures attention before and after a step.

    Args:
        records: Whether this rank records the measurement; the others only contribute their shards of the weights.
    """

    def __init__(self, probe: Probe, every_steps: int, records: bool) -> None:
        self._probe = probe
        self._every_steps = every_steps
        self._records = records
        self._before: list[Tensor] = []

    def is_due(self, step: int) -> bool:
        """Whether the step that follows `step` finished steps is measured."""
        return (step + 1) % self._every_steps == 0

    @torch.no_grad()
    def before_step(self) -> None:
        """Computes the logits before the step. Collective."""
        layers = self._probe.layers()
        self._before = [self._probe.logits(x_BTD).cpu() if self._records else x_BTD.new_empty(0) for x_BTD in layers]

    @torch.no_grad()
    def after_step(self, meter: UpdateMeter) -> AttentionReport | None:
        """Returns the measurement, or None on ranks that do not record it. Collective."""
        sizes = meter.read()
        layers = [
            self._layer_statistics(layer, x_BTD) if self._records else {}
            for layer, x_BTD in enumerate(self._probe.layers())
        ]
        self._before = []
        if not self._records:
            return None
        return AttentionReport(
            heads={name: [layer[name] for layer in layers] for name in layers[0]},
            norms={kind.value: norms for kind, (norms, _) in sizes.items()},
            update_ratios={
                kind.value: [step / norm if norm else 0.0 for norm, step in zip(*both, strict=True)]
                for kind, both in sizes.items()
            },
        )

    def _layer_statistics(self, layer: int, x_BTD: Tensor) -> dict[str, list[float]]:
        probe = self._probe
        q_BHTK, k_BGTK, v_BGTV = probe.project(x_BTD)
        logits_BHQT = sampled_logits(q_BHTK, k_BGTK, probe.positions_Q)
        attention = sampled_attention(logits_BHQT, v_BGTV, probe.positions_Q, probe.layer.softcap, probe.layer.sink)
        statistics = head_statistics(attention, SET_SIZES)
        statistics["logit_change"] = mean_change(logits_BHQT, self._before[layer].to(probe.device), probe.positions_Q)
        return {name: values_H.tolist() for name, values_H in statistics.items()}
