"""Actionable warnings about attention, from the monitor's measurements."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from statistics import median

from configs.schema import MonitorConfig
from launch.attention_control.monitor import AttentionReport

log = logging.getLogger(__name__)

MIN_HISTORY = 5  # measurements of a layer before its change is compared with their median
MAX_HISTORY = 20
MIN_ENTROPY_RISE = 0.1  # how far below the upper limit a head must have been for a rise above it to be reported

SLOW_DOWN_ADVICE = "lower optim.lr or qk_control.alpha (with qk_control.policy constant, quack or adaptive)"


class AttentionWarnings:
    """Checks every measurement, and logs each kind of warning at its 1st, 10th, 100th … occurrence.

    Attributes:
        counts: The number of occurrences of each kind; a measurement counts once, for any number of heads.
    """

    def __init__(self, limits: MonitorConfig) -> None:
        self.counts: dict[str, int] = {}
        self._limits = limits
        self._changes: list[deque[float]] = []
        self._lowest: list[list[float]] = []

    def update(self, step: int, report: AttentionReport) -> None:
        """Checks one measurement."""
        self._check_logits(step, report.heads["max_logit"])
        if "relative_entropy" in report.heads:
            self._check_entropy(step, report.heads["relative_entropy"])
        self._check_changes(step, report.heads["logit_change"])

    def _check_logits(self, step: int, max_logit_LH: list[list[float]]) -> None:
        limit = self._limits.warn_max_logit
        if limit is None:
            return
        found = _heads_where(max_logit_LH, lambda layer, head, value: value > limit)
        self._warn(
            step,
            "max_logit",
            sorted(found, reverse=True),
            f"its largest logit is {{value:.4g}} (monitor.warn_max_logit={limit:g}); {SLOW_DOWN_ADVICE}, or set "
            "qk_control.clip_threshold",
        )

    def _check_entropy(self, step: int, entropy_LH: list[list[float]]) -> None:
        low, high = self._limits.warn_min_entropy, self._limits.warn_max_entropy
        if low is not None:
            self._warn(
                step,
                "low_entropy",
                sorted(_heads_where(entropy_LH, lambda layer, head, value: value < low)),
                f"its entropy / log L fell to {{value:.3g}} (monitor.warn_min_entropy={low:g}): it attends to single "
                f"tokens; {SLOW_DOWN_ADVICE}, or set model.attention.qk_norm in a new run",
            )
        if high is not None and self._lowest:
            lowest = self._lowest
            found = _heads_where(
                entropy_LH, lambda layer, head, value: value > high and lowest[layer][head] < high - MIN_ENTROPY_RISE
            )
            self._warn(
                step,
                "high_entropy",
                sorted(found, reverse=True),
                f"its entropy / log L rose to {{value:.3g}} (monitor.warn_max_entropy={high:g}): it no longer "
                "distinguishes tokens; qk_control.alpha or optim.weight_decay may suppress it",
            )
        before = self._lowest or entropy_LH
        self._lowest = [list(map(min, old, new)) for old, new in zip(before, entropy_LH, strict=True)]

    def _check_changes(self, step: int, change_LH: list[list[float]]) -> None:
        factor = self._limits.warn_change_factor
        self._changes = self._changes or [deque(maxlen=MAX_HISTORY) for _ in change_LH]
        found = []
        for layer, (history, changes) in enumerate(zip(self._changes, change_LH, strict=True)):
            mean = sum(changes) / len(changes)
            usual = median(history) if len(history) >= MIN_HISTORY else None
            if factor is not None and usual and mean > factor * usual:
                head = max(range(len(changes)), key=changes.__getitem__)
                found.append((mean / usual, layer, head))
            history.append(mean)
        self._warn(
            step,
            "logit_change",
            sorted(found, reverse=True),
            f"the layer's logits moved {{value:.3g}} times as far as usual in one step (monitor.warn_change_factor="
            f"{factor}), this head's most; {SLOW_DOWN_ADVICE}",
        )

    def _warn(self, step: int, kind: str, found: list[tuple[float, int, int]], text: str) -> None:
        """Logs a warning about the first of (value, layer, head); `text` has a placeholder for the value."""
        if not found:
            return
        count = self.counts[kind] = self.counts.get(kind, 0) + 1
        if str(count).strip("0") != "1":
            return
        value, layer, head = found[0]
        others = f" ({len(found) - 1} more like it)" if len(found) > 1 else ""
        times = f", for the {count}th time" if count > 1 else ""
        log.warning("step %d: layer %d head %d%s%s: %s", step, layer, head, others, times, text.format(value=value))


def _heads_where(
    table_LH: list[list[float]], is_found: Callable[[int, int, float], bool]
) -> list[tuple[float, int, int]]:
    """(value, layer, head) of the heads for which `is_found(layer, head, value)`."""
    return [
        (value, layer, head)
        for layer, row in enumerate(table_LH)
        for head, value in enumerate(row)
        if is_found(layer, head, value)
    ]
