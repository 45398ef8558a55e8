"""Newton-Schulz iteration, compared with its polynomial applied to the singular values of an SVD in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.stability.orthogonal import orthogonalise, step_scale

SHAPES = [(12, 12), (8, 30), (30, 8), (1, 7), (7, 1), (3, 10, 24), (2, 3, 24, 10)]


def by_svd(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Applies the iteration's polynomial to the singular values of M / |M| = U S V'."""
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ vh


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", [1, 5, 7])
def test_the_result_is_the_polynomial_of_the_singular_values(shape: tuple[int, ...], steps: int) -> None:
    matrices = random(*shape)
    torch.testing.assert_close(
        orthogonalise(matrices, steps, torch.float64), by_svd(matrices, steps), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp32_rounding_errors_grow_by_at_most_the_slope_at_zero(shape: tuple[int, ...]) -> None:
    matrices = random(*shape).float()
    result = orthogonalise(matrices)
    assert result.dtype == torch.float32
    error = torch.linalg.matrix_norm(result.double() - by_svd(matrices, 5), ord=2)
    assert error.max() <= 3.4445**5 * torch.finfo(torch.float32).eps


def test_ill_conditioned_matrices_are_accurate_in_fp32() -> None:
    """Singular values range from 1 to 1e-6; errors grow in the small ones."""
    u, v = (torch.linalg.qr(random(n, n)).Q for n in (20, 21))
    matrix = (u * torch.logspace(0, -6, 20, dtype=torch.float64)) @ v[:20]
    error = torch.linalg.matrix_norm(orthogonalise(matrix.float()).double() - by_svd(matrix, 5), ord=2)
    assert error <= 3.4445**5 * torch.finfo(torch.float32).eps


def test_singular_values_are_close_to_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(random(40, 30, 50)))
    assert values.min() > 0.65 and values.max() < 1.25


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e9])
def test_the_scale_of_the_input_does_not_matter(scale: float) -> None:
    matrix = random(6, 9)
    eps_share = 1e-12 / (scale * matrix.norm().item()) if scale > 1e-12 else None
    result, expected = orthogonalise(matrix * scale, dtype=torch.float64), orthogonalise(matrix, dtype=torch.float64)
    if eps_share is None:
        assert result.norm() <= 1e-12, "an input far below EPS must not be amplified"
    else:
        torch.testing.assert_close(result, expected, rtol=0, atol=10 * eps_share + 1e-12)


def test_a_matrix_whose_norm_is_the_epsilon_is_finite() -> None:
    matrix = random(6, 9)
    matrix *= 1e-12 / matrix.norm()
    u, s, vh = torch.linalg.svd(0.5e12 * matrix, full_matrices=False)  # M / (|M| + EPS) = M / 2e-12
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalise(matrix, dtype=torch.float64), u @ torch.diag(s) @ vh, rtol=0, atol=1e-9)


def test_the_iteration_runs_in_the_given_dtype_and_the_result_has_the_inputs() -> None:
    matrix = random(6, 9).float()
    result = orthogonalise(matrix, dtype=torch.bfloat16)
    assert result.dtype == torch.float32
    assert torch.equal(result, result.bfloat16().float())
    assert not torch.equal(result, orthogonalise(matrix))


class LargestProduct(TorchDispatchMode):
    """Records the number of elements of the largest result of a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "bmm", "baddbmm"):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("shape", [(2, 50), (50, 2), (3, 50, 2)], ids=str)
def test_products_are_no_larger_than_the_matrix(shape: tuple[int, ...]) -> None:
    """The Gram matrix of a tall matrix is that of its columns."""
    with LargestProduct() as recorder:
        orthogonalise(random(*shape))
    assert recorder.numel == math.prod(shape)


def test_a_zero_matrix_stays_zero() -> None:
    assert orthogonalise(torch.zeros(2, 4, 5)).count_nonzero() == 0


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)], ids=str)
def test_a_step_is_close_to_torch_muon(shape: tuple[int, int]) -> None:
    """`torch.optim.Muon` iterates in bf16."""
    gradient = random(*shape).float()
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = gradient.clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.9, adjust_lr_fn="match_rms_adamw").step()
    ours = -step_scale(*shape) * orthogonalise(gradient)
    assert (weight.detach() - ours).norm() <= 0.03 * ours.norm()
    in_bf16 = -step_scale(*shape) * orthogonalise(gradient, dtype=torch.bfloat16)
    assert (weight.detach() - in_bf16).norm() <= 0.03 * ours.norm()


@pytest.mark.parametrize(("rows", "cols"), [(10, 10), (6, 20), (20, 6)])
def test_a_step_has_the_rms_of_adamw(rows: int, cols: int) -> None:
    orthogonal = torch.linalg.qr(random(max(rows, cols), min(rows, cols))).Q
    step = step_scale(rows, cols) * orthogonal
    assert step.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-12)
