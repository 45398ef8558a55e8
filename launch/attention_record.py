"""How a measurement of attention is recorded: numbers for metrics.jsonl and TensorBoard, and heat maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launch.monitor import AttentionReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "max_logit": "largest logit",
    "relative_entropy": "entropy / log L",
    "largest_weight": "mean largest weight",
    "first_token_weight": "weight of the first token",
    "logit_change": "mean |Δlogit| of a step",
    "separability_16": "N_s / N for N = 16",
}
# A layout of TensorBoard's custom scalars: title -> pattern of tags drawn in one chart.
CHARTS = {
    "loss": [r"loss/train", r"loss/validation"],
    "largest logit": [r"attention_max_logit/\d+", r"attention/max_logit"],
    "entropy / log L": [r"attention_relative_entropy/\d+"],
    "mean |Δlogit| of a step": [r"attention_logit_change/\d+"],
    "learning rates": [r"learning_rate/.*"],
    "query/key ratios": [r"qk_ratio/.*"],
    "query/key update ratios": [r"update_ratio_.*"],
    "gradient norm": [r"gradient_norm/all"],
}


def attention_record(report: AttentionReport) -> dict[str, Any]:
    """Keys of metrics.jsonl: over all heads, and by layer (the largest of max_logit, the mean of the others)."""
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
        "attention": {"all": over_all, "layers": by_layer},
        "qk_weights": {"norm": report.norms, "update_ratio": report.update_ratios},
    }


def attention_scalars(record: dict[str, Any]) -> dict[str, float]:
    """TensorBoard's tags of a record that has a measurement; none otherwise."""
    if "attention" not in record:
        return {}
    scalars = {f"attention/{name}": value for name, value in record["attention"]["all"].items()}
    tables = {f"attention_{name}": values for name, values in record["attention"]["layers"].items()}
    tables |= {f"norm_{kind}": values for kind, values in record["qk_weights"]["norm"].items()}
    tables |= {f"update_ratio_{kind}": values for kind, values in record["qk_weights"]["update_ratio"].items()}
    for tag, values in tables.items():
        scalars.update({f"{tag}/{layer:02d}": value for layer, value in enumerate(values)})
    return scalars


def heat_maps(report: AttentionReport, step: int) -> Figure:
    """Layers down, heads across, one map a statistic."""
    from matplotlib.figure import Figure

    names = [name for name in TITLES if name in report.heads]
    figure = Figure(figsize=(12, 7), layout="constrained")
    figure.suptitle(f"attention of the probe batch after step {step:,}")
    axes = figure.subplots(2, 3).flat
    for axis, name in zip(axes, names, strict=False):
        image = axis.imshow(report.heads[name], aspect="auto", cmap="viridis", interpolation="nearest")
        axis.set_title(TITLES[name])
        axis.set_xlabel("head")
        axis.set_ylabel("layer")
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axis)
    for axis in list(axes):
        axis.set_visible(False)
    return figure
