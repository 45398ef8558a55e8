"""Muon's step: the nearest orthogonal matrix to a gradient's momentum, approximately, and how far to go along it.

Shapes: N matrices, R rows, C columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The quintic a x + b x³ + c x⁵ maps (0, 1] to about [0.7, 1.2] in five iterations.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
DEFAULT_STEPS = 5
EPS = 1e-12  # only against a division by zero: a small gradient has the same direction as a large one


def orthogonalise(matrices_NRC: Tensor, steps: int = DEFAULT_STEPS, dtype: torch.dtype = torch.float32) -> Tensor:
    """U S' Vᵀ for a matrix U S Vᵀ, with all singular values S' near 1, by Newton-Schulz iteration.

    X ← M / ‖M‖_F, then `steps` times X ← a X + (b XXᵀ + c (XXᵀ)²) X (Jordan et al. 2024, "Muon: An optimizer for
    hidden layers in neural networks", kellerjordan.github.io/posts/muon). Singular vectors stay as they are; singular
    values below about 1e-3 of ‖M‖_F do not reach 1, and a zero matrix stays zero. Rounding errors of M grow at most by
    a^steps, 485 for five iterations.

    Args:
        matrices_NRC: one matrix, or a batch of them; a matrix with more rows than columns is treated as its transpose.
        dtype: of the iteration. The norm is taken in the matrices' own precision.

    Returns:
        A new tensor of the input's shape and dtype.
    """
    norm_N11 = torch.linalg.matrix_norm(matrices_NRC, keepdim=True)
    x_NRC = (matrices_NRC / (norm_N11 + EPS)).to(dtype).reshape(-1, *matrices_NRC.shape[-2:])
    is_tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    if is_tall:
        x_NRC = x_NRC.mT
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram_NRR = x_NRC @ x_NRC.mT
        # Fused with the addition, products are rounded once: in bf16 that halves the error of the result.
        polynomial_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, polynomial_NRR, x_NRC, beta=a)
    if is_tall:
        x_NRC = x_NRC.mT
    return x_NRC.to(matrices_NRC.dtype).reshape(matrices_NRC.shape)


def step_scale(rows: int, cols: int) -> float:
    """Factor between an orthogonal matrix and Muon's step at rate 1: 0.2 sqrt(max(rows, cols)).

    An orthogonal matrix has entries of RMS 1/sqrt(max(rows, cols)), so the step has RMS 0.2, about AdamW's, and
    AdamW's learning rates and weight decay fit (Liu et al., arXiv 2502.16982, equation 4).
    """
    return 0.2 * math.sqrt(max(rows, cols))
