"""From which set size on a head's selection looks random (Mudarisov et al., arXiv 2508.17821)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SIGNIFICANCE = 0.01
MIN_HEADS = 5  # the p-value of fewer is above SIGNIFICANCE even where the two samples do not overlap


def critical_size(p_values: Mapping[int, float], significance: float = SIGNIFICANCE) -> int | None:
    """The smallest set size whose top sets cannot be told from random ones; None when all can.

    Args:
        p_values: size -> p-value of `told_apart`.
    """
    return next((size for size in sorted(p_values) if p_values[size] > significance), None)


def told_apart(top: Sequence[float], random: Sequence[float]) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test between the heads' distances with top sets and random sets."""
    from scipy.stats import ks_2samp

    return float(ks_2samp(top, random).pvalue)
