"""The geometry of attention's values as loops over points α_i x_i."""

from __future__ import annotations

from torch import Tensor


def set_distance(points: list[Tensor], members: list[int]) -> float:
    """Returns the summed distances of all other points from the sum of the members."""
    centre = sum(points[i] for i in members)
    return sum(float((point - centre).norm()) for i, point in enumerate(points) if i not in members)


def separable_share(points: list[Tensor], members: list[int]) -> float:
    """Returns the share of members that are closer to the sum of the members than any other point."""
    centre = sum(points[i] for i in members)
    distances = [float((point - centre).norm()) for point in points]
    radius = min(distance for i, distance in enumerate(distances) if i not in members)
    return sum(distances[i] < radius for i in members) / len(members)
