"""Query/key control of a run: per-head steps and clipping, applied to this rank's weights at every ZeRO stage.

A learning rate belongs to a group, so the group has alpha times the base rate, and what differs by head or layer (the
ratio) is applied to the step itself: the local fp32 masters are kept before the optimizer's step, and what it changed
is scaled after it. That works with any optimizer whose state does not depend on the step (the moments of AdamW and the
momentum of Muon see the gradient only). Decoupled weight decay is part of the step and is scaled too. Clipping comes
after that, on the weights. DeepSpeed copies the masters to the model's weights later, so both are changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from launch.attention_control.head_weights import HeadTable, HeadWeights, UpdateMeter
from launch.attention_control.rules import Rule
from launch.errors import RunError
from model.stability.clip import LogitMaxima, clip_factors, logit_factor

log = logging.getLogger(__name__)


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
        self._num_clipped = torch.zeros(())

    def watch(self, targets_BT: Tensor) -> None:
        """Says which rows of the coming micro-batch are real: padding has no target."""
        row_mask_B = (targets_BT >= 0).any(dim=1)
        for layer in self._maxima:
            layer.row_mask_B = row_mask_B

    def agree(self) -> tuple[HeadTable, Tensor]:
        """From the largest logits of the step's batch, the same on all ranks. Collective.

        Returns:
            The factors of the heads' weights, and what they do to each query head's logits (L, H).
        """
        self._max_LH = torch.stack([layer.max_H for layer in self._maxima])
        dist.all_reduce(self._max_LH, op=dist.ReduceOp.MAX)
        for layer in self._maxima:
            layer.reset()
        factors = clip_factors(self._max_LH, self._threshold, self._num_key_heads)
        factor_LH = logit_factor(factors)
        self._num_clipped = (factor_LH < 1).sum()
        return factors, factor_LH

    def statistics(self) -> Tensor:
        """Number of query heads that were clipped, and the largest logit (-inf when none was); fp64."""
        largest = self._max_LH.max().double()
        return torch.stack([self._num_clipped.double(), largest.where(largest > self._threshold, -torch.inf)])


class QueryKeyControl:
    """A rule that scales steps, clipping, or both, or neither."""

    def __init__(self, weights: HeadWeights, rule: Rule | None, clipper: Clipper | None) -> None:
        self._meter: UpdateMeter | None = None
        self._weights = weights
        self._rule = rule
        self._clipper = clipper
        self._ratios: HeadTable = {}
        self._factors: HeadTable = {}
        self._clipping_LH: Tensor | None = None
        self._rate_multiplier = 0.0
        self._num_scaled = 0

    def measure_step(self) -> None:
        """Has the coming step measured."""
        self._meter = UpdateMeter(self._weights)

    def take_meter(self) -> UpdateMeter | None:
        """What was measured of the last step; None if nothing was to be measured. The next step is not measured."""
        meter, self._meter = self._meter, None
        return meter

    def prepare(self, step: int, rate_multiplier: float) -> None:
        """Sets the ratios of the coming step; see `Rule.update`. Collective.

        Args:
            rate_multiplier: the step's rate as a part of the peak's.
        """
        self._rate_multiplier = rate_multiplier
        if self._rule is not None:
            self._ratios = self._rule.update(step)

    def before_micro_batch(self, targets_BT: Tensor) -> None:
        """Before the forward pass of a micro-batch."""
        if self._clipper is not None:
            self._clipper.watch(targets_BT)

    def after_backward(self) -> None:
        """After the last backward pass, before the optimizer's step. Collective."""
        if self._clipper is not None:
            self._factors, self._clipping_LH = self._clipper.agree()

    def before_base_step(self, flats: Sequence[Tensor]) -> None:
        """Before the base optimizer changes `flats`."""
        if self._rule is not None or self._meter is not None:
            self._weights.keep(flats)

    def after_base_step(self, flats: Sequence[Tensor]) -> None:
        """After the base optimizer has changed `flats`."""
        if self._rule is not None:
            self._num_scaled += self._weights.scale_steps(flats, self._ratios)
        if self._clipper is not None:
            self._weights.scale(flats, self._factors)
        if self._meter is not None:
            self._meter.add(flats)
        self._weights.forget(flats)

    def check_applied(self) -> None:
        """After a step that was applied.

        Raises:
            RunError: the ratios did not reach every piece of the weights on this rank.
        """
        expected, self._num_scaled, found = self._weights.num_pieces, 0, self._num_scaled
        if self._rule is not None and found != expected:
            raise RunError(f"the query/key ratios reached {found} of {expected} pieces of weights on this rank")
        if self._rule is not None:
            self._rule.note_step(self._rate_multiplier, self._clipping_LH)

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
        if self._rule is None:
            return
        if state.keys() != self._rule.state().keys():
            log.info("qk_control.policy: the checkpoint is of another policy; this one starts afresh")
            return
        self._rule.load_state(state)
        self._rule.load_tensors(tensors)
