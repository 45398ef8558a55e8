"""How far the values that a head selects lie from those that it leaves out (Mudarisov et al., arXiv 2508.17821).

A query attends to L visible tokens with weights α_i and values x_i. A set I of N of them has the sum s = Σ_I α_i x_i,
with the weights as they are. Then

    distance          d = Σ over tokens outside I of ‖α_i x_i - s‖
    separable tokens  those of I whose α_i x_i is nearer to s than that of any token outside

Bounds and estimates are the paper's as corrected; the tests say which of them always hold.

Shapes: B sequences, H heads, Q queries, T positions, V value width, N tokens of a set. Weights are 0 where a query does
not see a token; a query at position t sees t + 1 tokens, and every function wants N of at most t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.diagnostics.weights import squared_distances
from model.stability.drift import visible


@dataclass(frozen=True)
class Separability:
    """N_s / N of every query (B, H, Q), with what the paper's geometry says about it.

    Attributes:
        share: N_s / N.
        lower_bound: it is never below this when all values have length 1.
        upper_estimate: an estimate that is exceeded now and then.
    """

    share: Tensor
    lower_bound: Tensor
    upper_estimate: Tensor


def top_set(weights_BHQT: Tensor, size: int) -> Tensor:
    """The N largest weights of every query, as a mask (B, H, Q, T)."""
    chosen_BHQN = weights_BHQT.topk(size, dim=-1).indices
    return torch.zeros_like(weights_BHQT, dtype=torch.bool).scatter_(-1, chosen_BHQN, True)


def random_set(positions_Q: Tensor, shape_BHQT: torch.Size, size: int, generator: torch.Generator) -> Tensor:
    """N random visible tokens of every query, all sets alike likely, as a mask (B, H, Q, T)."""
    keys = torch.rand(shape_BHQT, generator=generator, dtype=torch.float64)
    return top_set(keys.masked_fill(~visible(positions_Q.cpu(), shape_BHQT[-1]), -1.0), size).to(positions_Q.device)


def set_distance(weights_BHQT: Tensor, values_BHTV: Tensor, positions_Q: Tensor, chosen_BHQT: Tensor) -> Tensor:
    """The distance d of every query's set (B, H, Q)."""
    sum_BHQV = (weights_BHQT * chosen_BHQT) @ values_BHTV
    distances_BHQT = squared_distances(weights_BHQT, values_BHTV, sum_BHQV).sqrt()
    is_outside = visible(positions_Q, weights_BHQT.shape[-1]) & ~chosen_BHQT
    return (distances_BHQT * is_outside).sum(dim=-1)


def distance_bound(weights_BHQT: Tensor, values_BHTV: Tensor, positions_Q: Tensor, chosen_BHQT: Tensor) -> Tensor:
    """An upper bound of the distance of the top-N set (B, H, Q); for other sets it can fail.

    d <= (1 - ᾱ) d₁ + max_I ‖x_j‖ [ᾱ (L - N) - (1 - ᾱ)],      ᾱ = Σ_I α_i,  d₁ = max ‖x_i - x_j‖, i outside, j in I
    """
    T = weights_BHQT.shape[-1]
    size = chosen_BHQT.sum(dim=-1)
    is_outside = visible(positions_Q, T) & ~chosen_BHQT
    mass = (weights_BHQT * chosen_BHQT).sum(dim=-1)
    largest = values_BHTV.norm(dim=-1).unsqueeze(2).masked_fill(~chosen_BHQT, 0.0).amax(dim=-1)
    farthest = torch.zeros_like(mass)
    between_BHTT = torch.cdist(values_BHTV, values_BHTV)
    for query in range(len(positions_Q)):
        pairs = is_outside[:, :, query, :, None] & chosen_BHQT[:, :, query, None, :]
        farthest[:, :, query] = between_BHTT.masked_fill(~pairs, 0.0).amax(dim=(2, 3))
    num_outside = positions_Q + 1 - size
    return (1 - mass) * farthest + largest * (mass * num_outside - (1 - mass))


def random_distance(
    weights_BHQT: Tensor,
    values_BHTV: Tensor,
    positions_Q: Tensor,
    size: int,
    num_sets: int,
    generator: torch.Generator,
) -> Tensor:
    """Mean distance of `num_sets` random sets of every query (B, H, Q)."""
    total = torch.zeros(weights_BHQT.shape[:3], dtype=weights_BHQT.dtype, device=weights_BHQT.device)
    for _ in range(num_sets):
        chosen = random_set(positions_Q, weights_BHQT.shape, size, generator)
        total += set_distance(weights_BHQT, values_BHTV, positions_Q, chosen)
    return total / num_sets


def random_distance_estimate(weights_BHQT: Tensor, values_BHTV: Tensor, positions_Q: Tensor, size: int) -> Tensor:
    """A lower bound of the expected distance of a random set (B, H, Q), by Jensen's inequality.

    (L - N) / L · Σ_i ‖(1 + c) α_i x_i - c x̄‖,      c = N / (L - 1),  x̄ = Σ_j α_j x_j
    """
    num_visible_Q = (positions_Q + 1).to(weights_BHQT.dtype)
    c_Q1 = (size / (num_visible_Q - 1))[:, None]
    mean_BHQV = weights_BHQT @ values_BHTV
    # ‖(1 + c) α x - c x̄‖ is the distance of the weight (1 + c) α from the point c x̄.
    squares_BHQT = squared_distances((1 + c_Q1) * weights_BHQT, values_BHTV, c_Q1 * mean_BHQV)
    distances = squares_BHQT.sqrt() * visible(positions_Q, weights_BHQT.shape[-1])
    return (num_visible_Q - size) / num_visible_Q * distances.sum(dim=-1)


def separability(weights_BHQT: Tensor, values_BHTV: Tensor, positions_Q: Tensor, size: int) -> Separability:
    """N_s / N of the top-N sets, with values scaled to length 1, for which the bounds are made."""
    units_BHTV = torch.nn.functional.normalize(values_BHTV, dim=-1)
    chosen_BHQT = top_set(weights_BHQT, size)
    chosen_weights = weights_BHQT * chosen_BHQT
    squares = squared_distances(weights_BHQT, units_BHTV, chosen_weights @ units_BHTV)
    is_outside = visible(positions_Q, weights_BHQT.shape[-1]) & ~chosen_BHQT
    radius_BHQ1 = squares.masked_fill(~is_outside, torch.inf).amin(dim=-1, keepdim=True).sqrt()
    is_separable = (squares < radius_BHQ1.square()) & chosen_BHQT
    closest_BHQ1 = _closest_pairs(units_BHTV, chosen_BHQT)[..., None]
    others = chosen_weights.sum(dim=-1, keepdim=True) - weights_BHQT
    other_squares = chosen_weights.square().sum(dim=-1, keepdim=True) - weights_BHQT.square()
    xi = (other_squares + (1 - closest_BHQ1.square() / 2) * (others.square() - other_squares)).clamp_min(0).sqrt()
    estimate = torch.where(radius_BHQ1 < xi, torch.exp(-((radius_BHQ1 - xi) ** 2) / 16), 1.0)
    return Separability(
        share=is_separable.sum(dim=-1) / size,
        lower_bound=1 - (xi * chosen_BHQT).sum(dim=-1) / (radius_BHQ1.squeeze(-1) * size),
        upper_estimate=(estimate * chosen_BHQT).sum(dim=-1) / size,
    )


def _closest_pairs(units_BHTV: Tensor, chosen_BHQT: Tensor) -> Tensor:
    """Smallest distance between two different tokens of every set (B, H, Q); 0 for sets of one."""
    between_BHTT = torch.cdist(units_BHTV, units_BHTV, compute_mode="donot_use_mm_for_euclid_dist")
    is_same = torch.eye(units_BHTV.shape[2], dtype=torch.bool, device=units_BHTV.device)
    closest = torch.empty(chosen_BHQT.shape[:3], dtype=units_BHTV.dtype, device=units_BHTV.device)
    for query in range(chosen_BHQT.shape[2]):
        pairs = chosen_BHQT[:, :, query, :, None] & chosen_BHQT[:, :, query, None, :] & ~is_same
        closest[:, :, query] = between_BHTT.masked_fill(~pairs, torch.inf).amin(dim=(2, 3))
    return closest.nan_to_num(posinf=0.0)
