"""Query/key control of a run: per-head steps and clipping, applied to this rank's weights at every ZeRO stage.

A learning rate applies to a whole group, so the group gets alpha times the base learning rate, and what differs by head
or layer (the ratio) scales the step itself: the local fp32 masters are copied before the optimizer's step, and the
change is scaled after it. This works with any optimizer whose state does not depend on its own steps (AdamW's moments
and Muon's momentum depend on the gradients only). Decoupled weight decay is part of the step and is scaled too. Then
clipping scales the weights. DeepSpeed copies the masters to the model's weights afterwards, so both change.
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
        maxima: The largest logits of every layer.
        num_key_heads: The number of key heads; None for latent attention.
    """

    def __init__(self, maxima: Sequence[LogitMaxima], threshold: float, num_key_heads: int | None) -> None:
        self._maxima = maxima
        self._threshold = threshold
        self._num_key_heads = num_key_heads
        self._max_LH = torch.empty(0)
        self._num_clipped = torch.zeros(())

    def set_row_mask(self, targets_BT: Tensor) -> None:
        """Marks the padding rows of the next micro-batch, which have no targets, so that they are not measured."""
        row_mask_B = (targets_BT >= 0).any(dim=1)
        for layer in self._maxima:
            layer.row_mask_B = row_mask_B

    def compute_factors(self) -> tuple[HeadTable, Tensor]:
        """Computes the factors from the largest logits of the step's batch, the same on all ranks. Collective.

        Returns:
            The factors of the heads' weights, and the factor of each query head's logits that results (L, H).
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
        """The number of clipped query heads, and the largest logit (-inf if none was clipped); fp64."""
        largest = self._max_LH.max().double()
        return torch.stack([self._num_clipped.double(), largest.where(largest > self._threshold, -torch.inf)])


class QueryKeyControl:
    """Applies a rule that scales steps, clipping, both, or neither, and measures steps."""

    def __init__(self, weights: HeadWeights, rule: Rule | None, clipper: Clipper | None) -> None:
        self._meter: UpdateMeter | None = None
        self._weights = weights
        self._rule = rule
        self._clipper = clipper
        self._ratios: HeadTable = {}
        self._factors: HeadTable = {}
        self._clipping_LH: Tensor | None = None
        self._lr_multiplier = 0.0
        self._num_scaled = 0

    def measure_step(self) -> None:
        """Turns on measurement for the next step."""
        self._meter = UpdateMeter(self._weights)

    def pop_meter(self) -> UpdateMeter | None:
        """Returns the measurement of the last step, or None, and turns measurement off."""
        meter, self._meter = self._meter, None
        return meter

    def prepare(self, step: int, lr_multiplier: float) -> None:
        """Sets the ratios of the next step; see `Rule.update`. Collective.

        Args:
            lr_multiplier: The step's learning rate divided by the peak learning rate.
        """
        self._lr_multiplier = lr_multiplier
        if self._rule is not None:
            self._ratios = self._rule.update(step)

    def before_micro_batch(self, targets_BT: Tensor) -> None:
        """Must be called before the forward pass of every micro-batch."""
        if self._clipper is not None:
            self._clipper.set_row_mask(targets_BT)

    def after_backward(self) -> None:
        """Must be called between the last backward pass and the optimizer's step. Collective."""
        if self._clipper is not None:
            self._factors, self._clipping_LH = self._clipper.compute_factors()

    def before_base_step(self, flats: Sequence[Tensor]) -> None:
        """Must be called before the base optimizer updates `flats`."""
        if self._rule is not None or self._meter is not None:
            self._weights.copy_masters(flats)

    def after_base_step(self, flats: Sequence[Tensor]) -> None:
        """Must be called after the base optimizer has updated `flats`."""
        if self._rule is not None:
            self._num_scaled += self._weights.scale_steps(flats, self._ratios)
        if self._clipper is not None:
            self._weights.scale(flats, self._factors)
        if self._meter is not None:
            self._meter.add(flats)
        self._weights.drop_copies(flats)

    def after_applied_step(self) -> None:
        """Must be called after every step that was applied.

        Raises:
            RunError: Not every query/key shard of this rank was scaled.
        """
        expected, self._num_scaled, found = self._weights.num_shards, 0, self._num_scaled
        if self._rule is not None and found != expected:
            raise RunError(f"query/key ratios were applied to {found} shards of this rank; expected {expected}")
        if self._rule is not None:
            self._rule.after_applied_step(self._lr_multiplier, self._clipping_LH)

    def statistics(self) -> dict[str, Tensor]:
        """Statistics of the last step, fp64: `ratios` (3, L), smallest, mean and largest; `clip` (2), see `Clipper`."""
        result = {}
        if self._rule is not None:
            all_LN = torch.cat(list(self._ratios.values()), dim=-1)
            result["ratios"] = torch.stack([all_LN.amin(dim=-1), all_LN.mean(dim=-1), all_LN.amax(dim=-1)])
        if self._clipper is not None:
            result["clip"] = self._clipper.statistics()
        return result

    def record(self) -> dict[str, Any]:
        """Further entries for the last step's line in metrics.jsonl."""
        return self._rule.record() if self._rule is not None else {}

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON."""
        return self._rule.state() if self._rule is not None else {}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        return self._rule.tensors() if self._rule is not None else {}

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restores the policy from a checkpoint, unless the checkpoint has another policy's state or none."""
        if self._rule is None:
            return
        if state.keys() != self._rule.state().keys():
            log.info("qk_control.policy: the checkpoint has another policy's state; starting without it")
            return
        self._rule.load_state(state)
        self._rule.load_tensors(tensors)
