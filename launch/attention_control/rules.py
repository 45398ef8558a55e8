"""The rules that scale each head's step: the policies `quack` and `adaptive` with their state.

`none` and `constant` need no rule: the learning rates of the optimizer's groups implement them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from configs.schema import AdaptiveConfig
from launch.attention_control.head_weights import HeadTable, HeadWeights
from launch.attention_control.probe import DriftProbe
from launch.errors import RunError
from model.parameters import Kind
from model.stability.adaptive import NUM_TARGET_MEASUREMENTS, AdaptiveController
from model.stability.policies import LATENT_GAINS, quack_ratios

log = logging.getLogger(__name__)


class Rule(Protocol):
    """Computes the ratios of the next step."""

    def update(self, step: int) -> HeadTable:
        """Returns the ratio of every head of every matrix. Collective.

        Args:
            step: The number of finished optimizer steps.
        """

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON; the same on all ranks."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint of the same policy."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint; the same on all ranks."""

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the tensors from a checkpoint of the same policy."""

    def after_applied_step(self, lr_multiplier: float, clipping_LH: Tensor | None) -> None:
        """Called after every step that was applied.

        Args:
            lr_multiplier: The step's learning rate divided by the peak learning rate.
            clipping_LH: The factor that clipping applied to each query head's logits; None without clipping.
        """

    def record(self) -> dict[str, Any]:
        """Entries for this step's line in metrics.jsonl, besides the ratios."""


class QuackRule:
    """The policy `quack`. The initial norms are those before the first step with this policy.

    Args:
        has_qk_norm, max_ratio, kv_latent_dim: See `quack_ratios`.
    """

    def __init__(
        self,
        weights: HeadWeights,
        has_qk_norm: bool,
        max_ratio: float | None = None,
        kv_latent_dim: int | None = None,
    ) -> None:
        self._weights = weights
        self._has_qk_norm = has_qk_norm
        self._max_ratio = max_ratio
        self._kv_latent_dim = kv_latent_dim
        self._initial: dict[Kind, Tensor] | None = None

    def update(self, step: int) -> HeadTable:
        """Raises RunError if a head starts with zero weights."""
        norms = self._weights.norms()
        if self._initial is None:
            self._reject_zeros(norms)
            self._initial = norms
        return quack_ratios(norms, self._initial, self._has_qk_norm, self._max_ratio, self._kv_latent_dim)

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

    def after_applied_step(self, lr_multiplier: float, clipping_LH: Tensor | None) -> None:
        pass

    def record(self) -> dict[str, Any]:
        return {}

    def _reject_zeros(self, norms: HeadTable) -> None:
        for kind, table in norms.items():
            for layer, head in (table == 0).nonzero().tolist():
                raise RunError(
                    f"qk_control.policy=quack divides by the initial norm of every head, but that of head {head} of "
                    f"{self._weights.layouts[kind].names[layer]} is zero; start from other weights "
                    "(run.init_from), or set qk_control.policy=constant"
                )


class AdaptiveRule:
    """The policy `adaptive`: measures every few steps how far the logits drifted, and adjusts each layer's alpha.

    Args:
        alpha: The alpha in the group's learning rate; a layer's ratio is its own alpha divided by it.
        warmup_steps: Intervals that begin earlier are not used.
        last_step: The last step of the schedule.
    """

    def __init__(
        self,
        weights: HeadWeights,
        probe: DriftProbe,
        config: AdaptiveConfig,
        alpha: float,
        warmup_steps: int,
        last_step: int,
    ) -> None:
        self._weights = weights
        self._probe = probe
        self._every_steps = config.every_steps
        self._alpha = alpha
        self._warmup_steps = warmup_steps
        self._controller = AdaptiveController(
            weights.num_layers, alpha, config.target, config.exponent, config.min_alpha
        )
        self._start_step: int | None = None  # of the current interval
        self._progress = 0.0  # the sum of its steps' learning rate multipliers
        self._clipping_LH: Tensor | None = None  # the factor that clipping applied to the logits in it
        self._record: dict[str, Any] = {}
        self._ratios = self._table()
        first_use = warmup_steps + NUM_TARGET_MEASUREMENTS * config.every_steps
        if config.target is None and first_use >= last_step:
            log.warning(
                "qk_control.adaptive.target: null uses the first %d measurements after the warm-up, until step %d, but "
                "the run ends at step %d, so alpha will not change; set a target, or a smaller every_steps",
                NUM_TARGET_MEASUREMENTS,
                first_use,
                last_step,
            )

    def update(self, step: int) -> HeadTable:
        self._record = {}
        if self._start_step is None or step - self._start_step >= self._every_steps:
            self._measure(step)
        return self._ratios

    def after_applied_step(self, lr_multiplier: float, clipping_LH: Tensor | None) -> None:
        self._progress += lr_multiplier
        if clipping_LH is not None:
            self._clipping_LH = clipping_LH if self._clipping_LH is None else self._clipping_LH * clipping_LH

    def _measure(self, step: int) -> None:
        changes = self._probe.measure(self._clipping_LH)
        if changes is not None and self._start_step is not None and self._progress > 0:
            drifts, totals = ([change / self._progress for change in part] for part in changes)
            if self._start_step >= self._warmup_steps:
                had_target = self._controller.target is not None
                self._controller.observe(drifts)
                if not had_target and self._controller.target is not None:
                    log.info("qk_control.adaptive.target is %.4g from step %d on", self._controller.target, step)
            self._record = {
                "alpha": list(self._controller.alphas),
                "drift": drifts,
                "total_drift": totals,
                "target": self._controller.target,
            }
            self._ratios = self._table()
        self._start_step, self._progress, self._clipping_LH = step, 0.0, None

    def _table(self) -> HeadTable:
        alphas_L1 = torch.tensor(self._controller.alphas, dtype=torch.float64, device=self._weights.device)[:, None]
        return {
            kind: (alphas_L1 / self._alpha).expand(-1, layout.num_heads)
            for kind, layout in self._weights.layouts.items()
            if kind not in LATENT_GAINS
        }

    def state(self) -> dict[str, Any]:
        return {
            "alpha": self._alpha,
            "start_step": self._start_step,
            "progress": self._progress,
            "clipping": None if self._clipping_LH is None else self._clipping_LH.tolist(),
            "controller": self._controller.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Rule`. If `qk_control.alpha` has changed, every layer restarts from the new value."""
        self._start_step, self._progress = state["start_step"], state["progress"]
        if state["clipping"] is not None:
            self._clipping_LH = torch.tensor(state["clipping"], dtype=torch.float32, device=self._weights.device)
        self._controller.load_state(state["controller"])
        if state["alpha"] != self._alpha:
            log.info("qk_control.alpha has changed: every layer restarts from %g", self._alpha)
            self._controller.alphas = [self._alpha] * len(self._controller.alphas)
        self._ratios = self._table()

    def tensors(self) -> dict[str, Tensor]:
        return self._probe.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the probe batch and its last measurement, unless the configuration has another probe batch."""
        if not self._probe.load_tensors(tensors):
            log.info(
                "monitor.probe_sequences, probe_queries: no measurement in the checkpoint fits them; drift restarts"
            )
            self._start_step = None

    def record(self) -> dict[str, Any]:
        return {"qk_adaptive": self._record} if self._record else {}
