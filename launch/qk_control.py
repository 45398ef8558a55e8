"""Query/key control of a run: per-head steps and clipping, applied to this rank's weights at every ZeRO stage.

A learning rate belongs to a group, so the group has alpha times the base rate, and what differs by head or layer (the
ratio) is applied to the step itself: the local fp32 masters are kept before the optimizer's step, and what it changed
is scaled after it. That works with any optimizer whose state does not depend on the step (the moments of AdamW and the
momentum of Muon see the gradient only). Decoupled weight decay is part of the step and is scaled too. Clipping comes
after that, on the weights. DeepSpeed copies the masters to the model's weights later, so both are changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from configs.schema import AdaptiveConfig
from launch.errors import RunError
from launch.head_weights import HeadTable, HeadWeights, UpdateMeter
from launch.probe import DriftProbe
from model.parameters import Kind
from model.stability.adaptive import AdaptiveController
from model.stability.clip import LogitMaxima, clip_factors
from model.stability.policies import LATENT_GAINS, quack_ratios


class Rule(Protocol):
    """What decides the ratios of the coming step."""

    def update(self, step: int, rate_multiplier: float) -> HeadTable:
        """Ratio of every head of every matrix. Collective.

        Args:
            step: finished optimizer steps.
            rate_multiplier: the base rate of this step relative to its peak.
        """

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON; the same on all ranks."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint of the same policy."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint; the same on all ranks."""

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the tensors of a checkpoint of the same policy."""

    def record(self) -> dict[str, Any]:
        """What metrics.jsonl should hold of this step besides the ratios."""


class QuackRule:
    """The policy `quack`. The first step of a run (or of a run that takes up the policy) sets the initial norms.

    Args:
        has_qk_norm, max_ratio: see `quack_ratios`.
    """

    def __init__(self, weights: HeadWeights, has_qk_norm: bool, max_ratio: float | None) -> None:
        self._weights = weights
        self._has_qk_norm = has_qk_norm
        self._max_ratio = max_ratio
        self._initial: dict[Kind, Tensor] | None = None

    def update(self, step: int, rate_multiplier: float) -> HeadTable:
        """Raises RunError when a head starts with zero weights."""
        norms = self._weights.norms()
        if self._initial is None:
            self._refuse_zeros(norms)
            self._initial = norms
        return quack_ratios(norms, self._initial, self._has_qk_norm, self._max_ratio)

    def state(self) -> dict[str, Any]:
        return {"initial_norms": {kind.value: norms.tolist() for kind, norms in (self._initial or {}).items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        self._initial = {
            Kind(kind): torch.tensor(norms, dtype=torch.float64, device=self._weights.device)
            for kind, norms in state["initial_norms"].items()
        } or None

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        pass

    def record(self) -> dict[str, Any]:
        return {}

    def _refuse_zeros(self, norms: HeadTable) -> None:
        for kind, table in norms.items():
            for layer, head in (table == 0).nonzero().tolist():
                raise RunError(
                    f"qk_control.policy=quack divides by the initial norm of every head, and head {head} of "
                    f"{self._weights.layouts[kind].names[layer]} is zero; set model.init_std, or "
                    "qk_control.policy=constant"
                )


class AdaptiveRule:
    """The policy `adaptive`: every few steps it measures how far the weights moved the logits, and moves alphas.

    Args:
        alpha: of the group's rate; a layer's ratio is its own alpha divided by it.
        warmup_steps: intervals that begin earlier are not used.
    """

    def __init__(
        self, weights: HeadWeights, probe: DriftProbe, config: AdaptiveConfig, alpha: float, warmup_steps: int
    ) -> None:
        self._weights = weights
        self._probe = probe
        self._every_steps = config.every_steps
        self._alpha = alpha
        self._warmup_steps = warmup_steps
        self._controller = AdaptiveController(
            weights.num_layers, alpha, config.target, config.exponent, config.min_alpha
        )
        self._start_step: int | None = None  # of the interval that is being measured
        self._progress = 0.0  # its steps, each counted by its rate multiplier
        self._record: dict[str, Any] = {}

    def update(self, step: int, rate_multiplier: float) -> HeadTable:
        self._record = {}
        if self._start_step is None or step - self._start_step >= self._every_steps:
            self._measure(step)
        self._progress += rate_multiplier
        alphas_L1 = torch.tensor(self._controller.alphas, dtype=torch.float64, device=self._weights.device)[:, None]
        return {
            kind: (alphas_L1 / self._alpha).expand(-1, layout.num_heads)
            for kind, layout in self._weights.layouts.items()
            if kind not in LATENT_GAINS
        }

    def _measure(self, step: int) -> None:
        changes = self._probe.measure()
        if changes is not None and self._start_step is not None and self._progress > 0:
            drifts, totals = ([change / self._progress for change in part] for part in changes)
            if self._start_step >= self._warmup_steps:
                self._controller.observe(drifts)
            self._record = {
                "alpha": list(self._controller.alphas),
                "drift": drifts,
                "total_drift": totals,
                "target": self._controller.target,
            }
        self._start_step, self._progress = step, 0.0

    def state(self) -> dict[str, Any]:
        return {"start_step": self._start_step, "progress": self._progress, "controller": self._controller.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._start_step, self._progress = state["start_step"], state["progress"]
        self._controller.load_state(state["controller"])

    def tensors(self) -> dict[str, Tensor]:
        return self._probe.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._probe.load_tensors(tensors)

    def record(self) -> dict[str, Any]:
        return {"qk_adaptive": self._record} if self._record else {}


class Clipper:
    """QK-Clip over all layers.

    Args:
        maxima: of every layer.
        num_key_heads: None for latent attention.
    """

    def __init__(self, maxima: Sequence[LogitMaxima], threshold: float, num_key_heads: int | None) -> None:
        self._maxima = maxima
        self._threshold = threshold
        self._num_key_heads = num_key_heads
        self._max_LH = torch.empty(0)

    def watch(self, targets_BT: Tensor) -> None:
        """Says which rows of the coming micro-batch are real: padding has no target."""
        row_mask_B = (targets_BT >= 0).any(dim=1)
        for layer in self._maxima:
            layer.row_mask_B = row_mask_B

    def agree(self) -> HeadTable:
        """The factors of this step, the same on all ranks, from the largest logits of its batch. Collective."""
        self._max_LH = torch.stack([layer.max_H for layer in self._maxima])
        dist.all_reduce(self._max_LH, op=dist.ReduceOp.MAX)
        for layer in self._maxima:
            layer.reset()
        return clip_factors(self._max_LH, self._threshold, self._num_key_heads)

    def statistics(self) -> Tensor:
        """Number of heads that were clipped, and the largest logit (-inf below the threshold); fp64."""
        clipped = (self._max_LH > self._threshold).sum()
        return torch.stack([clipped.double(), self._max_LH.max().double()])


class QueryKeyControl:
    """A rule for the steps, clipping, or both, or neither.

    Attributes:
        meter: measures the coming step; None: nothing is to be measured.
    """

    def __init__(self, weights: HeadWeights, rule: Rule | None, clipper: Clipper | None) -> None:
        self.meter: UpdateMeter | None = None
        self._weights = weights
        self._rule = rule
        self._clipper = clipper
        self._ratios: HeadTable = {}
        self._factors: HeadTable = {}

    def measure_step(self) -> UpdateMeter:
        """Has the coming step measured."""
        self.meter = UpdateMeter(self._weights)
        return self.meter

    def prepare(self, step: int, rate_multiplier: float) -> None:
        """Sets the ratios of the coming step; see `Rule.update`. Collective."""
        if self._rule is not None:
            self._ratios = self._rule.update(step, rate_multiplier)

    def before_micro_batch(self, targets_BT: Tensor) -> None:
        """Before the forward pass of a micro-batch."""
        if self._clipper is not None:
            self._clipper.watch(targets_BT)

    def after_backward(self) -> None:
        """After the last backward pass, before the optimizer's step. Collective."""
        if self._clipper is not None:
            self._factors = self._clipper.agree()

    def before_base_step(self, flats: Sequence[Tensor]) -> None:
        """Before the base optimizer changes `flats`."""
        if self._rule is not None or self.meter is not None:
            self._weights.keep(flats)

    def after_base_step(self, flats: Sequence[Tensor]) -> None:
        """After the base optimizer has changed `flats`."""
        if self._rule is not None:
            self._weights.scale_steps(flats, self._ratios)
        if self._clipper is not None:
            self._weights.scale(flats, self._factors)
        if self.meter is not None:
            self.meter.add(flats)
        self._weights.forget(flats)

    def statistics(self) -> dict[str, Tensor]:
        """Of the last step, fp64: `ratios` (3, L), smallest, mean and largest; `clip` (2), see `Clipper`."""
        result = {}
        if self._rule is not None:
            all_LN = torch.cat(list(self._ratios.values()), dim=-1)
            result["ratios"] = torch.stack([all_LN.amin(dim=-1), all_LN.mean(dim=-1), all_LN.amax(dim=-1)])
        if self._clipper is not None:
            result["clip"] = self._clipper.statistics()
        return result

    def record(self) -> dict[str, Any]:
        """What else metrics.jsonl should hold of the last step."""
        return self._rule.record() if self._rule is not None else {}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return self._rule.state() if self._rule is not None else {}

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint."""
        return self._rule.tensors() if self._rule is not None else {}

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Takes what a checkpoint holds; nothing, or another policy's, leaves the policy as at its start."""
        if self._rule is not None and state.keys() == self._rule.state().keys():
            self._rule.load_state(state)
            self._rule.load_tensors(tensors)


def clip_record(statistics: Sequence[float]) -> dict[str, Any]:
    """`Clipper.statistics` as metrics.jsonl holds it; a logit below the threshold is not known exactly: null."""
    heads, max_logit = statistics
    return {"heads": int(heads), "max_logit": max_logit if math.isfinite(max_logit) else None}
