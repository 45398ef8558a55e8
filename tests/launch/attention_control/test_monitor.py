"""The live measurements of attention are those of the checkpoints' weights, on any number of ranks and ZeRO stage."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from configs.load import load_config
from configs.schema import MonitorConfig
from data.order import SampleOrder
from data.source import TokenSource
from launch.attention_control.monitor import AttentionReport
from launch.checkpoint.files import CheckpointReader
from launch.metrics.attention_record import HEAT_MAPS
from launch.metrics.attention_warnings import AttentionWarnings
from model.gpt import GPT
from tests.conftest import read_metrics
from tests.launch.attention_control.reference import attention_inputs, causal_logits

SETTINGS = [
    "train.steps=4",
    "monitor={every_steps: 2, probe_sequences: 2, probe_queries: 5}",
    "checkpoint={every_steps: 1, keep_last: 10}",
    "qk_control={policy: quack, alpha: 0.5}",
    "optim={lr: 2.0e-2, warmup_steps: 0}",
    "validation.every_steps=100",
]
ATTENTION = {
    "gqa": ["model.attention={softcap: 0.5, ssmax: true}"],
    "mla": ["model.attention={kind: mla, sink: true, gated: true, mla: {latent_norm: false}}"],
}
STEP = 4


def masters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    with CheckpointReader(folder / f"checkpoints/step_{step:08d}") as reader:
        return {name: reader.read_parameter(name) for name in reader.state.parameters}


def measured_by_hand(config: Any, folder: Path) -> dict[str, list[list[float]]]:
    """Statistics of every head after step 4 from the checkpoints of steps 3 and 4, with whole matrices in float64."""
    source = TokenSource.open(config.data.sources[0].path)
    window = SampleOrder([source.num_windows(32)], [1.0], config.run.seed).locate(np.arange(2)).window
    rows = np.empty((2, 33), np.int64)
    for row, index in zip(rows, window.tolist(), strict=True):
        source.read_window(index, 32, row)
    tokens = torch.from_numpy(rows[:, :-1].copy())
    logits, values = {}, []
    for step in (STEP - 1, STEP):
        model = GPT(config.model)
        model.load_state_dict(masters(folder, step))
        inputs = attention_inputs(model, tokens)
        logits[step] = [
            causal_logits(block.attention, x, config) for block, x in zip(model.blocks, inputs, strict=True)
        ]
        with torch.no_grad():
            rotary = model.rotary(torch.arange(32))
            projected = [block.attention.project(x, rotary) for block, x in zip(model.blocks, inputs, strict=True)]
        values = [v.double().repeat_interleave(4 // v.shape[1], dim=1) for _, _, v in projected]
    cap, positions = config.model.attention.softcap, [round(i * 31 / 5) for i in range(1, 6)]
    found: dict[str, list[list[float]]] = {}
    for layer, block in enumerate(model.blocks):
        now, before = logits[STEP][layer], logits[STEP - 1][layer]
        for head in range(4):
            samples: dict[str, list[float]] = {}
            for row, t in itertools.product(range(2), positions):
                visible = now[row, head, t, : t + 1]
                capped = visible if cap is None else cap * (visible / cap).tanh()
                total = capped.exp().sum()
                if config.model.attention.sink:
                    total = total + block.attention.sink.detach().double()[head].exp()
                weights = capped.exp() / total
                entropy = float(-(weights * weights.log()).sum())
                change = (visible - before[row, head, t, : t + 1]).abs()
                points = weights[:, None] * values[layer][row, head, : t + 1]
                for name, sample in {
                    "max_logit": float(visible.max()),
                    "entropy": entropy,
                    "relative_entropy": entropy / math.log(t + 1),
                    "largest_weight": float(weights.max()),
                    "effective_tokens": math.exp(entropy),
                    "first_token_weight": float(weights[0]),
                    **{f"separability_{size}": separable(weights, points, size) for size in (4, 16) if t >= size},
                }.items():
                    samples.setdefault(name, []).append(sample)
                samples.setdefault("logit_change", []).extend(change.tolist())
            for name, sample_values in samples.items():
                mean = max(sample_values) if name == "max_logit" else sum(sample_values) / len(sample_values)
                found.setdefault(name, [[], []])[layer].append(mean)
    return found


def separable(weights: torch.Tensor, points: torch.Tensor, size: int) -> float:
    """N_s / N of one query."""
    order = weights.argsort(descending=True)
    distances = (points - points[order[:size]].sum(0)).norm(dim=1)
    return float((distances[order[:size]] < distances[order[size:]].min()).sum()) / size


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_measurements_are_those_of_whole_matrices(
    is_compiled: bool, tiny_config: Path, tmp_path: Path, run_cases: Any
) -> None:
    stages = {1: (0, 1), 2: (0, 1, 3), 3: (2, 3)}
    cases = [
        (ranks, attention, stage, f"{attention}_s{stage}r{ranks}", [])
        for ranks, chosen in stages.items()
        for stage in chosen
        for attention in ATTENTION
    ]
    if is_compiled:
        cases.append((1, "gqa", 1, "gqa_compiled", ["train.compile=true"]))
    for ranks in stages:
        settings = [
            [*SETTINGS, *ATTENTION[attention], f"run.name={name}", f"deepspeed.zero_stage={stage}", *more]
            for case_ranks, attention, stage, name, more in cases
            if case_ranks == ranks
        ]
        outcomes = run_cases(ranks, [(tiny_config, overrides) for overrides in settings])
        assert outcomes == [[0] * len(settings)] * ranks
    runs = tmp_path / "runs"
    for attention, matrix in {"gqa": "key", "mla": "key_rope"}.items():
        config = load_config(tiny_config, [*SETTINGS, *ATTENTION[attention]])
        first = runs / f"{attention}_s0r1"
        expected = measured_by_hand(config, first)
        before, after = masters(first, STEP - 1), masters(first, STEP)
        for name in [name for _, kind, _, name, _ in cases if kind == attention]:
            records = read_metrics(runs / name)
            assert ["attention" in record for record in records] == [False, True, False, True]
            record = records[-1]
            assert record["attention"]["heads"].keys() == expected.keys()
            for statistic, heads in expected.items():
                # A share may differ by one token of one query.
                margin = {"rel": 1e-3, "abs": 0.03 if statistic.startswith("separability") else 1e-6}
                found = record["attention"]["heads"][statistic]
                assert np.array(found) == pytest.approx(np.array(heads), **margin), (name, statistic)
                by_layer = [max(row) if statistic == "max_logit" else sum(row) / len(row) for row in heads]
                assert record["attention"]["layers"][statistic] == pytest.approx(by_layer, **margin), (name, statistic)
            assert record["max_logit"] == pytest.approx(max(map(max, expected["max_logit"])), rel=1e-3)
            for layer in range(2):
                weight = f"blocks.{layer}.attention.{matrix}.weight"
                norm, step = after[weight].norm(), (after[weight] - before[weight]).norm()
                sizes = record["qk_weights"]
                assert sizes["norm"][matrix][layer] == pytest.approx(float(norm), rel=1e-4)
                assert sizes["update_ratio"][matrix][layer] == pytest.approx(float(step / norm), rel=1e-3)
    check_tensorboard(runs / "gqa_s1r2" / "tensorboard", expected.keys())


def check_tensorboard(folder: Path, statistics: Iterable[str]) -> None:
    """Scalars over all and per layer, a heat map a statistic, charts that are not empty, and hyperparameters."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    tags = events.Tags()
    for name in statistics:
        assert {f"attention/{name}", f"attention_{name}/00", f"attention_{name}/01"} <= set(tags["scalars"])
    assert set(tags["images"]) == {f"attention_heads/{name}" for name in HEAT_MAPS}
    for tag in tags["images"]:
        assert [image.step for image in events.Images(tag)] == [2, STEP], "the first and the last measurement"
    (layout_event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(layout_event.tensor_proto.string_val[0])
    for chart in layout.category[0].chart:
        for pattern in chart.multiline.tag:
            assert any(re.fullmatch(pattern, tag) for tag in tags["scalars"]), f"{chart.title}: {pattern}"
    start = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    values = start.session_start_info.hparams
    assert values["qk_control.alpha"].number_value == 0.5 and values["model.attention.kind"].string_value == "mha"
    shown = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/experiment").plugin_data.content)
    first = sorted(shown.experiment.hparam_infos, key=lambda info: (not info.differs, info.name))[:5]
    assert [info.name for info in first] == [
        "model.attention.kind", "model.dim", "optim.lr", "qk_control.alpha", "qk_control.policy"
    ]  # fmt: skip


def report(max_logit: float = 1.0, entropy: float = 0.5, change: float = 0.1) -> AttentionReport:
    """Two layers of two heads, the last one with these values."""
    heads = {
        name: [[usual, usual], [usual, value]]
        for name, usual, value in (
            ("max_logit", 1.0, max_logit),
            ("relative_entropy", 0.5, entropy),
            ("logit_change", 0.1, change),
        )
    }
    return AttentionReport(heads, {}, {})


def test_a_healthy_run_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    watch = AttentionWarnings(MonitorConfig())
    for step in range(30):
        watch.update(step, report())
    assert caplog.messages == [] and watch.counts == {}
    watch.update(30, report(max_logit=150.0))
    assert len(caplog.messages) == 1 and watch.counts == {"max_logit": 1}


@pytest.mark.parametrize(
    ("trouble", "kind", "value", "key"),
    [
        (report(max_logit=150.0), "max_logit", "is 150 ", "qk_control.clip_threshold"),
        (report(entropy=0.001), "low_entropy", "fell to 0.001 ", "monitor.warn_min_entropy=0.02"),
        (report(entropy=0.99), "high_entropy", "rose to 0.99 ", "monitor.warn_max_entropy=0.98"),
        (report(change=5.0), "logit_change", "moved 25.5 times", "optim.lr"),
    ],
)
def test_trouble_is_named_with_its_head_value_and_key_and_not_repeated(
    trouble: AttentionReport, kind: str, value: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A change that stays large becomes the usual one; the other kinds are counted, and named the 1st and 10th time."""
    watch = AttentionWarnings(MonitorConfig())
    for step in range(8):
        watch.update(step, report())
    for step in range(8, 20):
        watch.update(step, trouble)
    first = caplog.messages[0]
    assert first.startswith("step 8: layer 1 head 1: ") and "\n" not in first
    assert value in first and key in first
    if kind == "logit_change":
        assert set(watch.counts) == {kind} and len(caplog.messages) == 1
    else:
        assert watch.counts == {kind: 12}
        assert len(caplog.messages) == 2 and "for the 10th time" in caplog.messages[1]


def test_limits_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    off = MonitorConfig(warn_max_logit=None, warn_min_entropy=None, warn_max_entropy=None, warn_change_factor=None)
    watch, default = AttentionWarnings(off), AttentionWarnings(MonitorConfig())
    reports = [report(max_logit=math.inf, entropy=0.0, change=10.0**step) for step in range(10)]
    for step, trouble in enumerate(reports):
        watch.update(step, trouble)
    assert caplog.messages == [] and watch.counts == {}
    for step, trouble in enumerate(reports):
        default.update(step, trouble)
    assert set(default.counts) == {"max_logit", "low_entropy", "logit_change"}
