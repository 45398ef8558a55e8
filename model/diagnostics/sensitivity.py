"""How strongly softmax answers a small change of its logits (Mudarisov et al., arXiv 2508.17821, bounds corrected).

Shapes: any leading dimensions, T visible tokens last.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_sensitivity(logits: Tensor, temperature: float, epsilon: float, direction: Tensor) -> Tensor:
    """‖softmax((l + ε v) / τ) - softmax(l / τ)‖₂ / ε for a unit vector v over the last dimension.

    It is at most min(1 / (2 τ), sqrt(2) / ε).
    """
    moved = ((logits + epsilon * direction) / temperature).softmax(dim=-1)
    return (moved - (logits / temperature).softmax(dim=-1)).norm(dim=-1) / epsilon


def sensitivity_bound(temperature: float, epsilon: float) -> float:
    """The bound of `gradient_sensitivity`: the Jacobian of softmax at temperature τ has norm at most 1 / (2 τ), and two
    distributions are at most sqrt(2) apart."""
    return float(min(1 / (2 * temperature), 2**0.5 / epsilon))


def jacobian_norm_bracket(weights: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the spectral norm of softmax's Jacobian: p (1 - p) / τ and twice that, p the largest
    weight."""
    largest = weights.amax(dim=-1)
    lower = largest * (1 - largest) / temperature
    return lower, 2 * lower


def random_direction(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random unit vectors over the last dimension, in fp64."""
    return torch.nn.functional.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)
