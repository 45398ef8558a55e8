"""The learning rate schedule: pure functions of the step, so that a resumed run has the same learning rates."""

from __future__ import annotations

import math

from configs.schema import OptimConfig


def learning_rate(step: int, horizon_steps: int, optim: OptimConfig) -> float:
    """The base learning rate of optimizer step `step` (0-based).

    Linear warm-up reaches `optim.lr` at step `warmup_steps - 1`. Then, with p the elapsed fraction of the rest:
    constant; cosine from 1 to min_lr_ratio; or wsd, warm-up-stable-decay (Hu et al., arXiv 2404.06395): constant,
    and a linear decay to min_lr_ratio over the last `decay_fraction` of the horizon.

    Args:
        step: 0 ≤ step.
        horizon_steps: The value of train.steps; later steps keep the last learning rate.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    return optim.lr * _shape(step, horizon_steps, optim)


def _shape(step: int, horizon_steps: int, optim: OptimConfig) -> float:
    floor = optim.min_lr_ratio
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "cosine":
        progress = _progress(step, optim.warmup_steps, horizon_steps)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    decay_start = max(optim.warmup_steps, round(horizon_steps * (1 - optim.decay_fraction)))
    return 1 - (1 - floor) * _progress(step, decay_start, horizon_steps)


def _progress(step: int, start: int, end: int) -> float:
    """0 before `start`, 1 from `end` on, linear between."""
    if step >= end:
        return 1.0
    return max(step - start, 0) / max(end - start, 1)
