"""The analyses of Mudarisov et al., arXiv 2508.17821, on one layer's attention: tables with one row a head.

A row is a dict; `head` counts from 0 within the layer, `L` is the number of visible tokens of the query, `N` the size
of the set. Measures are means over the sequences of the batch. The sampled queries stand for the lengths: a query at
position t sees L = t + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from model.diagnostics import geometry
from model.diagnostics.sensitivity import (
    gradient_sensitivity,
    jacobian_norm_bracket,
    random_direction,
    sensitivity_bound,
)
from model.diagnostics.weights import SampledAttention, entropy

Row = dict[str, Any]


def at_query(attention: SampledAttention, query: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """(weights (B, H, 1, L), values (B, H, L, V), position (1), L) of one sampled query; hidden tokens are cut off."""
    position_1 = attention.positions_Q[query : query + 1]
    num_visible = int(position_1) + 1
    weights = attention.weights_BHQT[:, :, query : query + 1, :num_visible]
    return weights, attention.values_BHTV[:, :, :num_visible], position_1, num_visible


def _sets(attention: SampledAttention, set_sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor, int, int]]:
    """`at_query` of every sampled query with every set size that it sees more than."""
    for query in range(len(attention.positions_Q)):
        found = at_query(attention, query)
        for size in set_sizes:
            if size < found[-1]:
                yield *found, size


def distance_rows(
    attention: SampledAttention, set_sizes: Sequence[int], num_random_sets: int, generator: torch.Generator
) -> Iterator[Row]:
    """Distances of the top-N set and of random sets: `top`, its `bound`, `random`, and `random_estimate` below that."""
    for weights, values, position, num_visible, size in _sets(attention, set_sizes):
        chosen = geometry.top_set(weights, size)
        columns = {
            "top": geometry.set_distance(weights, values, position, chosen),
            "bound": geometry.distance_bound(weights, values, position, chosen),
            "random": geometry.random_distance(weights, values, position, size, num_random_sets, generator),
            "random_estimate": geometry.random_distance_estimate(weights, values, position, size),
        }
        yield from _rows({"L": num_visible, "N": size}, columns)


def separability_rows(attention: SampledAttention, set_sizes: Sequence[int]) -> Iterator[Row]:
    """`share` of separable tokens of the top-N set, its `lower_bound` and the `upper_estimate`; unit values."""
    for weights, values, position, num_visible, size in _sets(attention, set_sizes):
        found = geometry.separability(weights, values, position, size)
        columns = {
            "share": found.share,
            "lower_bound": found.lower_bound.clamp_min(0.0),
            "upper_estimate": found.upper_estimate,
        }
        yield from _rows({"L": num_visible, "N": size}, columns)


def critical_distances(
    attention: SampledAttention, set_sizes: Sequence[int], num_random_sets: int, generator: torch.Generator
) -> Iterator[Row]:
    """`top` and `random` distances for a fine grid of N, for the test that tells the two apart (`critical_size`)."""
    for weights, values, position, num_visible, size in _sets(attention, set_sizes):
        chosen = geometry.top_set(weights, size)
        columns = {
            "top": geometry.set_distance(weights, values, position, chosen),
            "random": geometry.random_distance(weights, values, position, size, num_random_sets, generator),
        }
        yield from _rows({"L": num_visible, "N": size}, columns)


def weight_rows(attention: SampledAttention) -> Iterator[Row]:
    """What the weights of each length look like.

    `entropy` in nats and divided by log L, `effective_tokens`, `max_logit`; `first_token_weight`; and for vanishing
    attention the smallest and largest weight times L.
    """
    for query in range(len(attention.positions_Q)):
        weights, _, _, num_visible = at_query(attention, query)
        logits = attention.logits_BHQT[:, :, query : query + 1, :num_visible]
        entropy_BH1 = entropy(weights)
        columns = {
            "entropy": entropy_BH1,
            "relative_entropy": entropy_BH1 / torch.tensor(float(num_visible)).log(),
            "effective_tokens": entropy_BH1.exp(),
            "max_logit": logits.amax(dim=-1),
            "first_token_weight": weights[..., 0],
            "scaled_min": num_visible * weights.amin(dim=-1),
            "scaled_max": num_visible * weights.amax(dim=-1),
        }
        yield from _rows({"L": num_visible}, columns)


def sensitivity_rows(
    attention: SampledAttention,
    temperatures: Sequence[float],
    epsilons: Sequence[float],
    generator: torch.Generator,
) -> Iterator[Row]:
    """`sensitivity` of the longest query's softmax in a random direction, its `bound`, and for the smallest ε the
    bracket `jacobian_low`, `jacobian_high` of the largest possible one."""
    query = len(attention.positions_Q) - 1
    _, _, _, num_visible = at_query(attention, query)
    logits = attention.logits_BHQT[:, :, query : query + 1, :num_visible].double()
    direction = random_direction(logits.shape, generator).to(logits.device)
    for temperature in temperatures:
        low, high = jacobian_norm_bracket((logits / temperature).softmax(dim=-1), temperature)
        for epsilon in epsilons:
            columns = {
                "sensitivity": gradient_sensitivity(logits, temperature, epsilon, direction),
                "jacobian_low": low,
                "jacobian_high": high,
            }
            fixed = {
                "L": num_visible,
                "temperature": temperature,
                "epsilon": epsilon,
                "bound": sensitivity_bound(temperature, epsilon),
            }
            yield from _rows(fixed, columns)


def _rows(fixed: Row, columns: dict[str, Tensor]) -> Iterator[Row]:
    """One row a head from columns (B, H, 1), means over B."""
    means = {name: values.double().mean(dim=(0, 2)).tolist() for name, values in columns.items()}
    for head in range(len(next(iter(means.values())))):
        yield {"head": head, **fixed, **{name: values[head] for name, values in means.items()}}
