"""What attention does while a model trains: statistics of every head around one step, on the probe batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launch.head_weights import UpdateMeter
from launch.probe import Probe
from model.diagnostics.weights import head_statistics, mean_change, sampled_attention
from model.stability.drift import sampled_logits

SET_SIZES = (4, 16, 64)  # N of the separability N_s / N


@dataclass(frozen=True)
class AttentionReport:
    """One measurement.

    Attributes:
        heads: statistic -> one row of heads a layer; see `head_statistics`, and `logit_change`, the mean |Δlogit| of
            the step.
        norms, update_ratios: query/key matrix -> Frobenius norm after the step, and ‖ΔW‖ / ‖W‖ of the step, one a
            layer.
    """

    heads: dict[str, list[list[float]]]
    norms: dict[str, list[float]]
    update_ratios: dict[str, list[float]]


class AttentionMonitor:
    """Measures before and after a step.

    Args:
        is_needed: whether this rank computes: the one that records does, and all do where weights are sharded.
    """

    def __init__(self, probe: Probe, every_steps: int, is_needed: bool) -> None:
        self._probe = probe
        self._every_steps = every_steps
        self._is_needed = is_needed
        self._before: list[Tensor] = []

    def is_due(self, step: int) -> bool:
        """Whether the step after `step` finished ones is measured."""
        return (step + 1) % self._every_steps == 0

    @torch.no_grad()
    def before_step(self) -> None:
        """Collective at ZeRO stage 3, as is `after_step`."""
        if self._is_needed:
            self._before = [self._probe.logits(x_BTD).cpu() for x_BTD in self._probe.layers()]

    @torch.no_grad()
    def after_step(self, meter: UpdateMeter) -> AttentionReport | None:
        """The measurement; None on ranks that do not compute. Collective."""
        sizes = meter.read()
        if not self._is_needed:
            return None
        layers = [self._layer_statistics(layer, x_BTD) for layer, x_BTD in enumerate(self._probe.layers())]
        self._before = []
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
