"""How far the values that a head selects are from the others (Mudarisov et al., arXiv 2508.17821).

A query attends to L visible tokens with weights α_i and values x_i. A set I of N of them has the sum s = Σ_I α_i x_i,
without renormalising the weights. Then

    distance          d = Σ over tokens outside I of ‖α_i x_i - s‖
    separable tokens  those in I whose α_i x_i is closer to s than that of any token outside

Bounds and estimates are corrected versions of the paper's; the tests check those that always hold.

Shapes: B sequences, H heads, Q queries, T positions, V value width, N tokens in a set. Weights are 0 where a query does
not see a token; a query at position t sees t + 1 tokens, and every function requires N to be at most t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.diagnostics.weights import squared_distances
from model.stability.drift import visible


@dataclass(frozen=True)
class Separability:
    """The share N_s / N of separable tokens of every query (B, H, Q), with the paper's bound and estimate.

    Attributes:
        share: N_s / N.
        lower_bound: A lower bound of the share if all values have norm 1.
        upper_estimate: An estimate from above that the share may occasionally exceed.
    """

    share: Tensor
    lower_bound: Tensor
    upper_estimate: Tensor


def top_set(weights_BHQT: Tensor, size: int) -> Tensor:
    """Returns the N largest weights of every query, as a mask (B, H, Q, T)."""
    chosen_BHQN = weights_BHQT.topk(size, dim=-1).indices
    return torch.zeros_like(weights_BHQT, dtype=torch.bool).scatter_(-1, chosen_BHQN, True)


def random_set(positions_Q: Tensor, shape_BHQT: torch.Size, size: int, generator: torch.Generator) -> Tensor:
    """Returns N uniformly random visible tokens for every query, as a mask (B, H, Q, T)."""
    keys = torch.rand(shape_BHQT, generator=generator, dtype=torch.float64)
    return top_set(keys.masked_fill(~visible(positions_Q.cpu(), shape_BHQT[-1]), -1.0), size).to(positions_Q.device)


def set_distance(weights_BHQT: Tensor, values_BHTV: Tensor, positions_Q: Tensor, chosen_BHQT: Tensor) -> Tensor:
    """Returns the distance d of every query's set (B, H, Q)."""
    sum_BHQV = (weights_BHQT * chosen_BHQT) @ values_BHTV
    distances_BHQT = squared_distances(weights_BHQT, values_BHTV, sum_BHQV).sqrt()
    is_outside = visible(positions_Q, weights_BHQT.shape[-1]) & ~chosen_BHQT
    return (distances_BHQT * is_outside).sum(dim=-1)


def distance_bound(weights_BHQT: Tensor, values_BHTV: Tensor, positions_Q: Tensor, chosen_BHQT: Tensor) -> Tensor:
    """Returns an upper bound of the distance of the top-N set (B, H, Q); it need not hold for other sets.

    d <= (1 - ᾱ) d₁ + max_I ‖x_j‖ [ᾱ (L - N) - (1 - ᾱ)],      ᾱ = Σ_I α_i,  d₁ = max ‖x_i - x_j‖, i outside, j in I
    """
    size = chosen_BHQT.sum(dim=-1)
    is_outside = visible(positions_Q, weights_BHQT.shape[-1]) & ~chosen_BHQT
    mass = (weights_BHQT * chosen_BHQT).sum(dim=-1)
    members_BHQNV = _members(values_BHTV, chosen_BHQT)
    largest = members_BHQNV.norm(dim=-1).amax(dim=-1)
    distances_BHQTN = torch.cdist(values_BHTV.unsqueeze(2), members_BHQNV)
    farthest = distances_BHQTN.masked_fill(~is_outside.unsqueeze(-1), 0.0).amax(dim=(3, 4))
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
    """Returns the mean distance of `num_sets` random sets for every query (B, H, Q)."""
    total = torch.zeros(weights_BHQT.shape[:3], dtype=weights_BHQT.dtype, device=weights_BHQT.device)
    for _ in range(num_sets):
        chosen = random_set(positions_Q, weights_BHQT.shape, size, generator)
        total += set_distance(weights_BHQT, values_BHTV, positions_Q, chosen)
    return total / num_sets


def random_distance_estimate(weights_BHQT: Tensor, values_BHTV: Tensor, positions_Q: Tensor, size: int) -> Tensor:
    """Returns a lower bound of the expected distance of a random set (B, H, Q), by Jensen's inequality.

    (L - N) / L · Σ_i ‖(1 + c) α_i x_i - c x̄‖,      c = N / (L - 1),  x̄ = Σ_j α_j x_j
    """
    num_visible_Q = (positions_Q + 1).to(weights_BHQT.dtype)
    c_Q1 = (size / (num_visible_Q - 1))[:, None]
    mean_BHQV = weights_BHQT @ values_BHTV
    # ‖(1 + c) α x - c x̄‖ is the distance between the value with weight (1 + c) α and the point c x̄.
    squares_BHQT = squared_distances((1 + c_Q1) * weights_BHQT, values_BHTV, c_Q1 * mean_BHQV)
    distances = squares_BHQT.sqrt() * visible(positions_Q, weights_BHQT.shape[-1])
    return (num_visible_Q - size) / num_visible_Q * distances.sum(dim=-1)


def separability(weights_BHQT: Tensor, values_BHTV: Tensor, positions_Q: Tensor, size: int) -> Separability:
    """Returns N_s / N of the top-N sets, with values scaled to norm 1, which the bounds assume."""
    units_BHTV = torch.nn.functional.normalize(values_BHTV, dim=-1)
    chosen_BHQT = top_set(weights_BHQT, size)
    chosen_weights = weights_BHQT * chosen_BHQT
    squares = squared_distances(weights_BHQT, units_BHTV, chosen_weights @ units_BHTV)
    is_outside = visible(positions_Q, weights_BHQT.shape[-1]) & ~chosen_BHQT
    radius_BHQ1 = squares.masked_fill(~is_outside, torch.inf).amin(dim=-1, keepdim=True).sqrt()
    is_separable = (squares < radius_BHQ1.square()) & chosen_BHQT
    closest_BHQ1 = _closest_pairs(_members(units_BHTV, chosen_BHQT))[..., None]
    others = chosen_weights.sum(dim=-1, keepdim=True) - weights_BHQT
    other_squares = chosen_weights.square().sum(dim=-1, keepdim=True) - weights_BHQT.square()
    xi = (other_squares + (1 - closest_BHQ1.square() / 2) * (others.square() - other_squares)).clamp_min(0).sqrt()
    estimate = torch.where(radius_BHQ1 < xi, torch.exp(-((radius_BHQ1 - xi) ** 2) / 16), 1.0)
    return Separability(
        share=is_separable.sum(dim=-1) / size,
        lower_bound=1 - (xi * chosen_BHQT).sum(dim=-1) / (radius_BHQ1.squeeze(-1) * size),
        upper_estimate=(estimate * chosen_BHQT).sum(dim=-1) / size,
    )


def _members(values_BHTV: Tensor, chosen_BHQT: Tensor) -> Tensor:
    """Returns the values of every query's set (B, H, Q, N, V); all sets must have the same size."""
    size = int(chosen_BHQT[0, 0, 0].sum())
    index_BHQN = chosen_BHQT.to(torch.uint8).topk(size, dim=-1).indices
    return torch.stack(
        [
            values_BHTV.gather(2, index_BHQN[:, :, query, :, None].expand(-1, -1, -1, values_BHTV.shape[-1]))
            for query in range(index_BHQN.shape[2])
        ],
        dim=2,
    )


def _closest_pairs(members_BHQNV: Tensor) -> Tensor:
    """Returns the smallest distance between two different members of every set (B, H, Q); 0 for sets of one."""
    between_BHQNN = torch.cdist(members_BHQNV, members_BHQNV, compute_mode="donot_use_mm_for_euclid_dist")
    is_same = torch.eye(members_BHQNV.shape[3], dtype=torch.bool, device=members_BHQNV.device)
    return between_BHQNN.masked_fill(is_same, torch.inf).amin(dim=(3, 4)).nan_to_num(posinf=0.0)
