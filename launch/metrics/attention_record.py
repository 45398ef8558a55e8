"""Records a measurement of attention: values for metrics.jsonl and TensorBoard, and heat maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from configs.policies import ADAPTIVE, QUACK
from configs.schema import Config
from launch.attention_control.monitor import AttentionReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Statistic -> title of its heat map, and the limits of its colour scale (None: from the values).
HEAT_MAPS: dict[str, tuple[str, float | None, float | None]] = {
    "max_logit": ("largest logit", None, None),
    "relative_entropy": ("entropy / log L", None, 1.0),
    "largest_weight": ("mean largest weight", 0.0, None),
    "first_token_weight": ("weight of the first token", 0.0, None),
    "logit_change": ("mean |Δlogit| of a step", 0.0, None),
    "separability_16": ("N_s / N for N = 16", 0.0, 1.0),
}
POLICY_CHARTS = {
    QUACK: {"query/key ratios": [r"qk_ratio/.*"]},
    ADAPTIVE: {"alpha of each layer": [r"qk_adaptive_alpha/\d+"]},
}
SIGNIFICANT_DIGITS = 4  # of the values of single heads in metrics.jsonl


def charts(config: Config) -> dict[str, list[str]]:
    """The layout of TensorBoard's custom scalars for what this run records: chart title -> patterns of its tags."""
    found = {"loss": [r"loss/train", r"loss/validation"]}
    if config.monitor.every_steps is not None:
        found |= {
            "largest logit": [r"attention_max_logit/\d+", r"attention/max_logit"],
            "entropy / log L": [r"attention_relative_entropy/\d+"],
            "mean |Δlogit| of a step": [r"attention_logit_change/\d+"],
            "weight of the first token": [r"attention_first_token_weight/\d+"],
            "query/key update ratios": [r"update_ratio_.*"],
        }
    found["learning rates"] = [r"learning_rate/.*"]
    found |= POLICY_CHARTS.get(config.qk_control.chosen, {})
    return found | {"gradient norm": [r"gradient_norm/all"]}


def attention_record(report: AttentionReport) -> dict[str, Any]:
    """The keys for metrics.jsonl: by head, by layer and overall (the maximum of max_logit, the mean of the others)."""
    by_layer = {
        name: [max(row) if name == "max_logit" else sum(row) / len(row) for row in rows]
        for name, rows in report.heads.items()
    }
    over_all = {
        name: max(values) if name == "max_logit" else sum(values) / len(values) for name, values in by_layer.items()
    }
    return {
        "max_logit": over_all["max_logit"],
        "entropy": over_all["entropy"],
        "logit_change": over_all["logit_change"],
        "attention": {"all": over_all, "layers": by_layer, "heads": _rounded(report.heads)},
        "qk_weights": {"norm": report.norms, "update_ratio": report.update_ratios},
    }


def attention_scalars(record: dict[str, Any]) -> dict[str, float]:
    """The TensorBoard scalars of a record; none if the record has no measurement."""
    if "attention" not in record:
        return {}
    scalars = {f"attention/{name}": value for name, value in record["attention"]["all"].items()}
    tables = {f"attention_{name}": values for name, values in record["attention"]["layers"].items()}
    tables |= {f"norm_{kind}": values for kind, values in record["qk_weights"]["norm"].items()}
    tables |= {f"update_ratio_{kind}": values for kind, values in record["qk_weights"]["update_ratio"].items()}
    for tag, values in tables.items():
        scalars.update({f"{tag}/{layer:02d}": value for layer, value in enumerate(values)})
    return scalars


def _rounded(heads: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    return {
        name: [[float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in row] for row in rows]
        for name, rows in heads.items()
    }


def heat_maps(report: AttentionReport) -> dict[str, Figure]:
    """One heat map per statistic, with a row per layer and a column per head, at the size that TensorBoard displays."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figures = {}
    for name, (title, low, high) in HEAT_MAPS.items():
        if name not in report.heads:
            continue
        figure = figures[name] = Figure(figsize=(4, 2.6), dpi=120)
        axis = figure.add_axes((0.12, 0.19, 0.66, 0.7))
        image = axis.imshow(
            report.heads[name], aspect="auto", cmap="viridis", interpolation="nearest", vmin=low, vmax=high
        )
        axis.set(title=title, xlabel="head", ylabel="layer")
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, cax=figure.add_axes((0.81, 0.19, 0.04, 0.7)), format="%.4g")
    return figures
