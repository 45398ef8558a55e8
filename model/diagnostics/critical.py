"""The set size from which attention's selection looks random (Mudarisov et al., arXiv 2508.17821)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SIGNIFICANCE = 0.01
MIN_HEADS = 5  # with fewer, the p-value exceeds SIGNIFICANCE even if the two samples do not overlap


def critical_size(p_values: Mapping[int, float], significance: float = SIGNIFICANCE) -> int | None:
    """Returns the smallest set size whose top sets are indistinguishable from random sets, or None.

    Args:
        p_values: Set size -> p-value from `ks_p_value`.
        significance: Sets with a larger p-value are indistinguishable.
    """
    return next((size for size in sorted(p_values) if p_values[size] > significance), None)


def ks_p_value(top: Sequence[float], random: Sequence[float]) -> float:
    """Returns the p-value of the two-sample Kolmogorov-Smirnov test between the distances of top and random sets."""
    from scipy.stats import ks_2samp

    return float(ks_2samp(top, random).pvalue)
