"""Muon's step: the approximately nearest orthogonal matrix to a gradient's momentum, and its scale.

Shapes: N matrices, R rows, C columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The quintic a x + b x³ + c x⁵ maps (0, 1] to about [0.7, 1.2] in five iterations.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
DEFAULT_STEPS = 5
EPS = 1e-12  # avoids division by zero; small enough that even tiny gradients are normalised


def orthogonalise(matrices_NRC: Tensor, steps: int = DEFAULT_STEPS, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns U S' Vᵀ for a matrix U S Vᵀ, with all singular values S' near 1, using Newton-Schulz iteration.

    X ← M / ‖M‖_F, then `steps` times X ← a X + (b XXᵀ + c (XXᵀ)²) X (Jordan et al. 2024, "Muon: An optimizer for
    hidden layers in neural networks", kellerjordan.github.io/posts/muon). Singular vectors do not change. Singular
    values below about 1e-3 of ‖M‖_F do not reach 1, and a zero matrix stays zero. Rounding errors of M grow by at most
    a factor of a^steps, 485 for five iterations.

    Args:
        matrices_NRC: One matrix or a batch of them; a matrix with more rows than columns is transposed first.
        steps: Number of iterations.
        dtype: Dtype of the iteration; the norm is computed in the matrices' own dtype.

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
        # baddbmm rounds the product and the addition only once, which halves the error of the result in bf16.
        polynomial_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, polynomial_NRR, x_NRC, beta=a)
    if is_tall:
        x_NRC = x_NRC.mT
    return x_NRC.to(matrices_NRC.dtype).reshape(matrices_NRC.shape)


def step_scale(rows: int, cols: int) -> float:
    """Returns the ratio of Muon's step at learning rate 1 to an orthogonal matrix: 0.2 sqrt(max(rows, cols)).

    The elements of an orthogonal matrix have an RMS of 1/sqrt(max(rows, cols)), so those of the step have an RMS of
    0.2. That is close to AdamW's, so AdamW's learning rates and weight decay carry over (Liu et al., arXiv 2502.16982,
    equation 4).
    """
    return 0.2 * math.sqrt(max(rows, cols))
