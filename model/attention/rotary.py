"""Rotary position embeddings (Su et al., arXiv 2104.09864), in Llama's half-split layout.

Dimension i of a head is paired with i + K/2, so Hugging Face weights load without a permutation.

Shapes: B batch, T time, H heads, K rotated width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of the rotation at every position.

    The tables are computed from integers in every forward pass instead of being stored in a module, because
    casting a module to bf16 would round its float buffers.

    Args:
        positions: Integer positions (T), or (B, T) if each row has its own.
        dim: Rotated width of a head, an even number.
        theta: Base of the frequencies theta^(-2i/dim).

    Returns:
        cos and signed_sin in fp32, (T, K) or (B, T, K). Row t is (cos, cos) and (-sin, sin), so that
        x * cos + roll(x, K/2) * signed_sin rotates both halves.
    """
    exponents = torch.arange(0, dim, 2, device=positions.device).float() / dim
    frequencies = 1.0 / theta**exponents
    angles = positions.float().unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x_BTHK: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates every head of x according to its position, in fp32; the result has x's shape and dtype."""
    cos, signed_sin = table
    x = x_BTHK.float()
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos.unsqueeze(-2), swapped, signed_sin.unsqueeze(-2)).to(x_BTHK.dtype)
