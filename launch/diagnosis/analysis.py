"""The analyses of `launch.diagnose`: runs windows of a text through a model and tabulates its attention."""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from launch.cli import new_folder
from launch.diagnosis import LENGTHS, SET_SIZES
from launch.diagnosis.report import write_report
from launch.diagnosis.sources import AttentionSource, ModelShape, open_source
from launch.errors import RunError
from model.diagnostics import analysis
from model.diagnostics.weights import SampledAttention

TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
EPSILONS = (1e-3, 1e-1, 10.0)
KEYS = ("layer", "head", "L", "N", "temperature", "epsilon")  # identify a row of a table

Tables = dict[str, list[dict[str, Any]]]


def parse_numbers(option: str, text: str | None) -> list[int] | None:
    """Parses numbers such as `0,3,8-11` into a sorted list without duplicates; returns None for None.

    Raises:
        RunError: The text is malformed or empty.
    """
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise RunError(f"{option} {text!r}: expected numbers and ranges such as 0,3,8-11")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return sorted(numbers)


def diagnose(options: argparse.Namespace) -> None:
    """Runs the analyses and writes the output folder.

    Raises:
        RunError, ValueError, OSError: The model, the text or an option is invalid.
    """
    if not 0 <= options.seed < 2**63:
        raise RunError(f"--seed: {options.seed} is not between 0 and 2^63 - 1")
    if options.max_queries < 1 or options.random_sets < 1:
        raise RunError("--max-queries, --random-sets: expected at least 1")
    wanted = {
        name: parse_numbers(f"--{name.replace('_', '-')}", getattr(options, name))
        for name in ("layers", "heads", "lengths", "set_sizes")
    }
    try:
        text = options.text.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RunError(f"--text {options.text}: is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise RunError(f"--text {options.text}: {error.strerror}") from None
    source = open_source(options.model, options.tokenizer)
    lengths = choose_lengths(wanted["lengths"], source.shape)
    layers = _choose("--layers", wanted["layers"], source.shape.num_layers)
    heads = _choose("--heads", wanted["heads"], source.shape.num_heads)
    set_sizes = wanted["set_sizes"] or list(SET_SIZES)
    for size in wanted["set_sizes"] or ():
        if not 1 <= size < max(lengths):
            raise RunError(
                f"--set-sizes: {size} is not between 1 and {max(lengths) - 1}, one less than the longest length"
            )
    tokens = source.encode(text)
    if tokens and max(tokens) >= source.shape.vocab_size:
        raise RunError(
            f"the tokenizer's id {max(tokens)} is outside the model's vocabulary of {source.shape.vocab_size}; "
            "give the model's own tokenizer with --tokenizer"
        )
    windows = cut_windows(tokens, max(lengths), options.max_queries, options.text)
    with new_folder(options.output) as folder:
        tables = measure(source, windows, lengths, layers, heads, set_sizes, options)
        for name, rows in tables.items():
            write_csv(folder / f"{name}.csv", rows)
        write_report(folder, source.shape, tables, options.text.name, len(windows))
    print(f"{options.output / 'report.html'}")


def choose_lengths(wanted: Sequence[int] | None, shape: ModelShape) -> list[int]:
    """Returns the lengths to analyse, ascending: those requested, or the defaults that fit into the model's context.

    Raises:
        RunError: A length is out of range.
    """
    if wanted is None:
        fitting = [length for length in LENGTHS if length <= shape.max_seq_len]
        return fitting or [shape.max_seq_len]
    for length in wanted:
        if not 2 <= length <= shape.max_seq_len:
            raise RunError(f"--lengths: {length} is not between 2 and the model's context of {shape.max_seq_len}")
    return list(wanted)


def _choose(option: str, wanted: Sequence[int] | None, count: int) -> list[int]:
    if wanted is None:
        return list(range(count))
    if wanted[-1] >= count:
        raise RunError(f"{option}: {wanted[-1]} does not exist; the model has 0 to {count - 1}")
    return list(wanted)


def cut_windows(tokens: Sequence[int], length: int, count: int, text: Path) -> list[list[int]]:
    """Returns at most `count` evenly spaced windows that do not overlap.

    Raises:
        RunError: The text is shorter than one window.
    """
    if len(tokens) < length:
        raise RunError(f"--text {text}: has {len(tokens)} tokens; the largest length needs {length} (--lengths)")
    count = min(count, len(tokens) // length)
    spacing = len(tokens) // count
    return [list(tokens[index * spacing : index * spacing + length]) for index in range(count)]


def measure(
    source: AttentionSource,
    windows: Sequence[Sequence[int]],
    lengths: Sequence[int],
    layers: Sequence[int],
    heads: Sequence[int],
    set_sizes: Sequence[int],
    options: argparse.Namespace,
) -> Tables:
    """Returns all tables, as means over the windows."""
    generator = torch.Generator().manual_seed(options.seed)
    positions_Q = torch.tensor([length - 1 for length in lengths])
    sums: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = defaultdict(dict)
    total = len(windows) * len(layers)
    with tqdm(total=total, unit="layer", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
        for number, window in enumerate(windows):
            for layer, attention in source.layers(torch.tensor(window), positions_Q):
                if layer in layers:
                    part = select_heads(attention, heads)
                    for name, rows in analyse(part, set_sizes, lengths, options.random_sets, generator).items():
                        _add(sums[name], rows, layer, heads, 1 / len(windows))
                    bar.update()
            if bar.disable:
                print(f"window {number + 1} of {len(windows)}", file=sys.stderr, flush=True)
    return {name: list(rows.values()) for name, rows in sums.items()}


def select_heads(attention: Any, heads: Sequence[int]) -> Any:
    """Returns the attention of a subset of the heads."""
    return SampledAttention(
        attention.positions_Q,
        attention.logits_BHQT[:, heads],
        attention.weights_BHQT[:, heads],
        attention.values_BHTV[:, heads],
    )


def analyse(
    attention: Any,
    set_sizes: Sequence[int],
    lengths: Sequence[int],
    num_random_sets: int,
    generator: torch.Generator,
) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of one layer and window for each table."""
    grid = fine_sizes(max(lengths))
    return {
        "distance": list(analysis.distance_rows(attention, set_sizes, num_random_sets, generator)),
        "separability": list(analysis.separability_rows(attention, set_sizes)),
        "critical": list(analysis.critical_distances(attention, grid, num_random_sets, generator)),
        "weights": list(analysis.weight_rows(attention)),
        "sensitivity": list(analysis.sensitivity_rows(attention, TEMPERATURES, EPSILONS, generator)),
    }


def fine_sizes(length: int) -> list[int]:
    """Returns about 20 sizes from 1 to half the length, each about a third larger than the one before."""
    sizes = {1}
    size = 1.0
    while size < length / 2:
        sizes.add(round(size))
        size *= 1.35
    return sorted(sizes)


def _add(
    table: dict[tuple[Any, ...], dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    layer: int,
    heads: Sequence[int],
    share: float,
) -> None:
    """Adds the rows of one window to the table of means."""
    for row in rows:
        full = {"layer": layer, **row, "head": heads[row["head"]]}
        key = tuple(full.get(name) for name in KEYS)
        known = table.setdefault(key, {name: value if name in KEYS else 0.0 for name, value in full.items()})
        for name, value in full.items():
            if name not in KEYS:
                known[name] += share * value


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a table with a header."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
