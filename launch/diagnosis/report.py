"""The report of `launch.diagnose`: plots and their explanations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from launch.diagnosis.sources import ModelShape
from launch.reporting.document import Block, to_html, to_markdown
from model.diagnostics.critical import MIN_HEADS, SIGNIFICANCE, critical_size, ks_p_value

MAX_TICKS = 12
LARGE_SET = 16  # the paper gives one range for the separable share of sets with N of at least this
SMALLEST_SENSITIVITY = 1e-6  # below it, softmax has saturated; the plot ends there

TITLE = "Attention analysis"
HEADER = ("", "here", "paper (GPT-2 124M, War and Peace)")

Rows = list[dict[str, Any]]
Tables = dict[str, Rows]


@dataclass(frozen=True)
class Finding:
    """One row of the table that compares the values measured here with the paper's."""

    measure: str
    here: str
    paper: str


@dataclass(frozen=True)
class Section:
    """One plot with its explanation.

    Attributes:
        name: The name of the PNG file, without extension.
        text: What the plot shows, and what the paper states about it.
        draw: Draws into a figure.
    """

    name: str
    title: str
    text: str
    draw: Callable[[Figure], None]


def write_report(folder: Path, shape: ModelShape, tables: Tables, text_name: str, num_windows: int) -> None:
    """Writes the plots, report.md and report.html."""
    sections = make_sections(tables)
    for section in sections:
        figure = Figure(figsize=(10, 5), layout="constrained")
        section.draw(figure)
        figure.savefig(folder / f"{section.name}.png", dpi=110)
    lengths = sorted({row["L"] for row in tables["weights"]})
    intro = (
        f"Model: {shape.name} ({shape.num_parameters:,} parameters, {shape.num_layers} layers, "
        f"{shape.num_heads} query heads). Text: {text_name}, {num_windows} windows; lengths L = "
        f"{', '.join(map(str, lengths))}. The analyses follow Mudarisov et al., arXiv 2508.17821; the paper's values "
        "are for GPT-2 124M on War and Peace. Each line is a mean over heads (band: the 10th to 90th percentile). "
        "These are measurements; none of them alone says whether the model is good."
    )
    rows = ((finding.measure, finding.here, finding.paper) for finding in compare(tables))
    blocks = [
        Block("heading", TITLE, level=1),
        Block("text", intro),
        Block("table", lines=(HEADER, *rows)),
        *(block for section in sections for block in _section_blocks(section)),
    ]
    (folder / "report.md").write_text(to_markdown(blocks), encoding="utf-8")
    (folder / "report.html").write_text(to_html(blocks, TITLE), encoding="utf-8")


def _section_blocks(section: Section) -> tuple[Block, Block, Block]:
    return (
        Block("heading", section.title),
        Block("text", section.text),
        Block("image", section.title, file=f"{section.name}.png"),
    )


def compare(tables: Tables) -> list[Finding]:
    """Compares the measurements for which the paper gives a value."""
    longest = max(row["L"] for row in tables["weights"])
    critical = [
        f"none up to {max(values)} at L = {length}" if size is None else f"{size / length:.3f} L at L = {length}"
        for length, values in critical_p_values(tables).items()
        for size in [critical_size(values)]
    ]
    if len({(row["layer"], row["head"]) for row in tables["critical"]}) < MIN_HEADS:
        critical = [f"not measured (the test needs at least {MIN_HEADS} heads)"]
    large = [row["share"] for row in tables["separability"] if row["L"] == longest and row["N"] >= LARGE_SET]
    product = max(row["sensitivity"] * row["temperature"] for row in tables["sensitivity"])
    return [
        Finding("critical set size", "; ".join(critical), "about 0.06 L"),
        Finding(
            f"separable share beyond N = {LARGE_SET}, mean over heads at L = {longest}",
            f"{np.mean(large):.2f}" if large else f"not measured (no N of at least {LARGE_SET})",
            "0.70 to 0.85",
        ),
        Finding(
            "largest gradient sensitivity times temperature",
            f"{product:.3f}",
            "at most 0.25 (0.5 can be proven)",
        ),
    ]


def critical_p_values(tables: Tables) -> dict[int, dict[int, float]]:
    """Returns length -> set size -> p-value of the test whether distances differ between top and random sets."""
    samples: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for row in tables["critical"]:
        top, random = samples.setdefault((row["L"], row["N"]), ([], []))
        top.append(row["top"])
        random.append(row["random"])
    p_values: dict[int, dict[int, float]] = {}
    for (length, size), (top, random) in sorted(samples.items()):
        p_values.setdefault(length, {})[size] = ks_p_value(top, random)
    return p_values


def make_sections(tables: Tables) -> list[Section]:
    """Returns the sections of the report in their order."""
    longest = max(row["L"] for row in tables["weights"])
    sections = [*_distance_sections(tables, longest), _separability_section(tables, longest)]
    return [*sections, *_softmax_sections(tables), *_map_sections(tables, longest)]


def _distance_sections(tables: Tables, longest: int) -> list[Section]:
    rows = tables["distance"]
    sizes = sorted({row["N"] for row in rows})
    p_values = critical_p_values(tables)

    def by_length(figure: Figure) -> None:
        axis = figure.subplots()
        for index, size in enumerate(sizes):
            chosen = [row for row in rows if row["N"] == size]
            _band(axis, chosen, "L", "top", f"C{index}", f"top {size}")
            _band(axis, chosen, "L", "random", f"C{index}", f"random {size}", style="--", with_band=False)
        _label(axis, "visible tokens L", "distance of the tokens outside", log_x=True, log_y=True)

    def by_size(figure: Figure) -> None:
        axis = figure.subplots()
        chosen = [row for row in rows if row["L"] == longest]
        for index, (kind, style) in enumerate(
            {"top": "-", "random": "-", "bound": ":", "random_estimate": ":"}.items()
        ):
            _band(axis, chosen, "N", kind, f"C{index}", kind.replace("_", " "), style, with_band=index < 2)
        _label(axis, "set size N", f"distance of the tokens outside, L = {longest}", log_x=True, log_y=True)

    def significance(figure: Figure) -> None:
        axis = figure.subplots()
        for length, values in p_values.items():
            axis.plot(list(values), [max(p, 1e-16) for p in values.values()], marker=".", label=f"L = {length}")
        _label(axis, "set size N", "p-value of the Kolmogorov-Smirnov test", log_x=True, log_y=True)
        axis.axhline(SIGNIFICANCE, color="black", linewidth=0.8)

    return [
        Section(
            "distance_by_length",
            "Distance against length",
            "The distance of the tokens outside a set from the sum of the set, for the N largest weights and for "
            "random sets. Where the two lines of a colour meet, selecting the largest weights no longer distinguishes "
            "tokens.",
            by_length,
        ),
        Section(
            "distance_by_size",
            "Distance against set size",
            "The same at the longest length, with the upper bound for top sets and the lower estimate for random "
            "sets. The bound holds for every query; the mean of random sets lies above its estimate.",
            by_size,
        ),
        Section(
            "critical_size",
            "Critical set size",
            "For each N, the two-sample Kolmogorov-Smirnov test of whether the heads' distances for top and for random "
            f"sets differ. The first N above the line at {SIGNIFICANCE} is critical.",
            significance,
        ),
    ]


def _separability_section(tables: Tables, longest: int) -> Section:
    rows = [row for row in tables["separability"] if row["L"] == longest]

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        for index, (kind, style) in enumerate({"share": "-", "lower_bound": ":", "upper_estimate": ":"}.items()):
            _band(axis, rows, "N", kind, f"C{index}", kind.replace("_", " "), style, with_band=index == 0)
        _label(axis, "set size N", f"N_s / N, L = {longest}", log_x=True)

    return Section(
        "separability",
        "Separable share",
        "The share of the N selected tokens that are closer to the set's sum than any token outside the set, with "
        "values scaled to length 1. It is never below the lower bound; it may exceed the upper estimate.",
        draw,
    )


def _softmax_sections(tables: Tables) -> list[Section]:
    weights, sensitivity = tables["weights"], tables["sensitivity"]
    length = sensitivity[0]["L"]

    def vanishing(figure: Figure) -> None:
        axis = figure.subplots()
        for index, kind in enumerate(("scaled_max", "scaled_min")):
            _band(
                axis, weights, "L", kind, f"C{index}", f"L times the {'largest' if index == 0 else 'smallest'} weight"
            )
        _label(axis, "visible tokens L", "L α", log_x=True, log_y=True)

    def gradient(figure: Figure) -> None:
        axis = figure.subplots()
        for index, epsilon in enumerate(sorted({row["epsilon"] for row in sensitivity})):
            chosen = [row for row in sensitivity if row["epsilon"] == epsilon]
            _band(axis, chosen, "temperature", "sensitivity", f"C{index}", f"measured, ε = {epsilon:g}")
            bounds = sorted({(row["temperature"], row["bound"]) for row in chosen})
            axis.plot(*zip(*bounds, strict=True), color=f"C{index}", linestyle=":", label=f"bound, ε = {epsilon:g}")
        _label(axis, "temperature", f"‖Δ softmax‖ / ε, L = {length}", log_x=True, log_y=True)
        axis.set_ylim(bottom=SMALLEST_SENSITIVITY)

    return [
        Section(
            "vanishing",
            "Vanishing attention",
            "The largest and smallest weight of a query times the number of visible tokens. With bounded logits both "
            "stay between two constants as L grows (lemma 1), so that every single weight vanishes like 1 / L; a "
            "rising line shows logits that grow with L.",
            vanishing,
        ),
        Section(
            "sensitivity",
            "Gradient sensitivity",
            "The change of the softmax for a small random change of the logits, over the temperature. It stays below "
            "min(1 / (2 T), sqrt(2) / ε); the paper's 1 / (4 T) bounds single entries of the Jacobian, not its norm.",
            gradient,
        ),
    ]


def _map_sections(tables: Tables, longest: int) -> list[Section]:
    rows = [row for row in tables["weights"] if row["L"] == longest]
    layers, heads = (sorted({row[key] for row in rows}) for key in ("layer", "head"))

    def maps(figure: Figure) -> None:
        kinds = {"relative_entropy": "entropy / log L", "first_token_weight": "weight of the first token"}
        for axis, (kind, title) in zip(figure.subplots(1, 2), kinds.items(), strict=True):
            table = np.full((len(layers), len(heads)), np.nan)
            for row in rows:
                table[layers.index(row["layer"]), heads.index(row["head"])] = row[kind]
            image = axis.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0, vmax=1)
            axis.set(title=title, xlabel="head", ylabel="layer")
            axis.set_xticks(range(len(heads)), heads, fontsize=7)
            axis.set_yticks(range(len(layers)), layers, fontsize=7)
            figure.colorbar(image, ax=axis)

    return [
        Section(
            "maps",
            "Entropy and attention sinks",
            f"Entropy relative to log L, and the weight of the first token, of every head at L = {longest}. Heads with "
            "low entropy attend to few tokens; a head that gives most of its weight to the first token uses it as a "
            "sink.",
            maps,
        )
    ]


def _band(
    axis: Any, rows: Rows, x: str, y: str, color: str, label: str, style: str = "-", with_band: bool = True
) -> None:
    """Plots the mean over heads against x, and the 10th to 90th percentile as a band."""
    places = sorted({row[x] for row in rows})
    values = [[row[y] for row in rows if row[x] == place] for place in places]
    axis.plot(places, [np.mean(part) for part in values], style, color=color, marker=".", label=label)
    if with_band:
        low, high = ([np.percentile(part, percent) for part in values] for percent in (10, 90))
        axis.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)


def _label(axis: Any, x: str, y: str, log_x: bool = False, log_y: bool = False) -> None:
    axis.set(xlabel=x, ylabel=y)
    if log_x:
        places = sorted({float(place) for line in axis.get_lines() for place in line.get_xdata()} - {0.0})
        shown = places[:: -(-len(places) // MAX_TICKS)]
        axis.set_xscale("log")
        axis.set_xticks(shown, [f"{place:g}" for place in shown])
        axis.minorticks_off()
    if log_y:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=2)
