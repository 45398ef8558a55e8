"""The sensitivity of softmax to small changes of its logits (Mudarisov et al., arXiv 2508.17821, corrected bounds).

Shapes: any leading dimensions, then T visible tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_sensitivity(logits: Tensor, temperature: float, epsilon: float, direction: Tensor) -> Tensor:
    """Returns ‖softmax((l + ε v) / τ) - softmax(l / τ)‖₂ / ε for a unit vector v over the last dimension.

    It is at most min(1 / (2 τ), sqrt(2) / ε).
    """
    moved = ((logits + epsilon * direction) / temperature).softmax(dim=-1)
    return (moved - (logits / temperature).softmax(dim=-1)).norm(dim=-1) / epsilon


def sensitivity_bound(temperature: float, epsilon: float) -> float:
    """Returns the upper bound of `gradient_sensitivity`.

    The Jacobian of softmax at temperature τ has norm at most 1 / (2 τ), and the distance between two distributions is
    at most sqrt(2).
    """
    return float(min(1 / (2 * temperature), 2**0.5 / epsilon))


def jacobian_norm_bracket(weights: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns lower and upper bounds of the spectral norm of softmax's Jacobian.

    They are p (1 - p) / τ and twice that, where p is the largest weight.
    """
    largest = weights.amax(dim=-1)
    lower = largest * (1 - largest) / temperature
    return lower, 2 * lower


def random_direction(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Returns random unit vectors over the last dimension, in fp64."""
    return torch.nn.functional.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)
