"""The analyses of Mudarisov et al., arXiv 2508.17821, for one layer's attention, as tables with one row per head.

A row is a dict. `head` is the head's 0-based index within the layer, `L` the number of tokens visible to the query, and
`N` the size of the set. Values are means over the sequences of the batch. Each sampled query represents one context
length: a query at position t sees L = t + 1 tokens.
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
    """Returns (weights (B, H, 1, L), values (B, H, L, V), position (1), L) of a sampled query's visible tokens."""
    position_1 = attention.positions_Q[query : query + 1]
    num_visible = int(position_1) + 1
    weights = attention.weights_BHQT[:, :, query : query + 1, :num_visible]
    return weights, attention.values_BHTV[:, :, :num_visible], position_1, num_visible


def _sets(attention: SampledAttention, set_sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor, int, int]]:
    """Yields `at_query` of every sampled query with every set size below its L."""
    for query in range(len(attention.positions_Q)):
        found = at_query(attention, query)
        for size in set_sizes:
            if size < found[-1]:
                yield *found, size


def distance_rows(
    attention: SampledAttention, set_sizes: Sequence[int], num_random_sets: int, generator: torch.Generator
) -> Iterator[Row]:
    """Yields the distances of the top-N set and of random sets.

    `top` has the upper bound `bound`, and `random` the lower bound `random_estimate`.
    """
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
    """Yields the `share` of separable tokens in the top-N set, its `lower_bound` and `upper_estimate` (unit values)."""
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
    """Yields `top` and `random` distances for a fine grid of N, from which `critical_size` is determined."""
    for weights, values, position, num_visible, size in _sets(attention, set_sizes):
        chosen = geometry.top_set(weights, size)
        columns = {
            "top": geometry.set_distance(weights, values, position, chosen),
            "random": geometry.random_distance(weights, values, position, size, num_random_sets, generator),
        }
        yield from _rows({"L": num_visible, "N": size}, columns)


def weight_rows(attention: SampledAttention) -> Iterator[Row]:
    """Yields statistics of the weights for each context length.

    `entropy` in nats, `relative_entropy` (divided by log L), `effective_tokens`, `max_logit` and `first_token_weight`;
    and, for vanishing attention, the smallest and largest weight times L (`scaled_min`, `scaled_max`).
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
    """Yields the `sensitivity` of the last sampled query's softmax in a random direction, and its `bound`.

    `jacobian_low` and `jacobian_high` bracket the largest sensitivity in any direction as ε goes to 0.
    """
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
    """Yields one row per head from columns (B, H, 1), averaged over B."""
    means = {name: values.double().mean(dim=(0, 2)).tolist() for name, values in columns.items()}
    for head in range(len(next(iter(means.values())))):
        yield {"head": head, **fixed, **{name: values[head] for name, values in means.items()}}
