"""The live measurements of attention are those of the checkpoints' weights, on any number of ranks and ZeRO stage."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from configs.load import load_config
from configs.schema import MonitorConfig
from data.order import SampleOrder
from data.source import TokenSource
from launch.attention_watch import AttentionWatch
from launch.checkpoint_files import CheckpointReader
from launch.monitor import AttentionReport
from model.gpt import GPT
from tests.conftest import read_metrics
from tests.launch.qk_reference import attention_inputs, causal_logits

SETTINGS = [
    "train.steps=4",
    "monitor={every_steps: 2, probe_sequences: 2, probe_queries: 5}",
    "checkpoint={every_steps: 1, keep_last: 10}",
    "qk_control={policy: quack, alpha: 0.5}",
    "optim={lr: 2.0e-2, warmup_steps: 0}",
    "validation.every_steps=100",
]
ATTENTION = {
    "gqa": ["model.attention.softcap=0.5"],
    "mla": ["model.attention={kind: mla, sink: true, mla: {latent_norm: false}}"],
}
STEP = 4


def masters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    with CheckpointReader(folder / f"checkpoints/step_{step:08d}") as reader:
        return {name: reader.read_parameter(name) for name in reader.state.parameters}


def measured_by_hand(config: Any, folder: Path) -> dict[str, Any]:
    """Statistics after step 4 from the checkpoints of steps 3 and 4, with whole matrices in float64."""
    source = TokenSource.open(config.data.sources[0].path)
    window = SampleOrder([source.num_windows(32)], [1.0], config.run.seed).locate(np.arange(2)).window
    rows = np.empty((2, 33), np.int64)
    for row, index in zip(rows, window.tolist(), strict=True):
        source.read_window(index, 32, row)
    tokens = torch.from_numpy(rows[:, :-1].copy())
    logits = {}
    for step in (STEP - 1, STEP):
        model = GPT(config.model)
        model.load_state_dict(masters(folder, step))
        inputs = attention_inputs(model, tokens)
        logits[step] = [
            causal_logits(block.attention, x, config) for block, x in zip(model.blocks, inputs, strict=True)
        ]
    cap = config.model.attention.softcap
    positions = [round(i * 31 / 5) for i in range(1, 6)]
    max_logit, entropies, changes = [], [], []
    for layer, block in enumerate(model.blocks):
        now, before = logits[STEP][layer], logits[STEP - 1][layer]
        largest = [float(now[:, :, t, : t + 1].max()) for t in positions]
        max_logit.append(max(largest))
        entropy, change = [], []
        for t in positions:
            row = now[:, :, t, : t + 1]
            capped = row if cap is None else cap * (row / cap).tanh()
            total = capped.exp().sum(-1, keepdim=True)
            if config.model.attention.sink:
                total = total + block.attention.sink.detach().double().exp().view(-1, 1, 1).squeeze(-1)
            weights = capped.exp() / total
            entropy += (-weights * weights.log()).sum(-1).flatten().tolist()
            change += (row - before[:, :, t, : t + 1]).abs().flatten().tolist()
        entropies.append(sum(entropy) / len(entropy))
        changes.append(sum(change) / len(change))
    return {"max_logit": max_logit, "entropy": entropies, "logit_change": changes}


def test_measurements_are_those_of_whole_matrices(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    stages = {1: (0, 1), 2: (1, 2, 3)}
    names = {
        ranks: [(attention, stage, f"{attention}_s{stage}r{ranks}") for attention in ATTENTION for stage in chosen]
        for ranks, chosen in stages.items()
    }
    for ranks, cases in names.items():
        settings = [
            [*SETTINGS, *ATTENTION[attention], f"run.name={name}", f"deepspeed.zero_stage={stage}"]
            for attention, stage, name in cases
        ]
        assert run_cases(ranks, [(tiny_config, overrides) for overrides in settings]) == [[0] * len(cases)] * ranks
    runs = tmp_path / "runs"
    for attention, matrix in {"gqa": "key", "mla": "key_rope"}.items():
        config = load_config(tiny_config, [*SETTINGS, *ATTENTION[attention]])
        first = runs / f"{attention}_s0r1"
        expected = measured_by_hand(config, first)
        before, after = masters(first, STEP - 1), masters(first, STEP)
        for name in [name for cases in names.values() for kind, _, name in cases if kind == attention]:
            records = read_metrics(runs / name)
            assert ["attention" in record for record in records] == [False, True, False, True]
            record = records[-1]
            for statistic, values in expected.items():
                assert record["attention"]["layers"][statistic] == pytest.approx(values, rel=1e-3, abs=1e-6), name
            assert record["max_logit"] == pytest.approx(max(expected["max_logit"]), rel=1e-3)
            for layer in range(2):
                weight = f"blocks.{layer}.attention.{matrix}.weight"
                norm, step = after[weight].norm(), (after[weight] - before[weight]).norm()
                found = record["qk_weights"]
                assert found["norm"][matrix][layer] == pytest.approx(float(norm), rel=1e-4)
                assert found["update_ratio"][matrix][layer] == pytest.approx(float(step / norm), rel=1e-3)
    events = EventAccumulator(str(runs / "gqa_s1r2" / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    tags = events.Tags()
    assert {"attention/max_logit", "attention_relative_entropy/01"} <= set(tags["scalars"])
    assert "attention" in tags["images"]
    assert any("custom_scalars" in tag for tag in tags["tensors"])
    start = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    values = start.session_start_info.hparams
    assert values["qk_control.alpha"].number_value == 0.5 and values["model.attention.kind"].string_value == "mha"


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
    watch = AttentionWatch(MonitorConfig())
    for step in range(30):
        watch.look(step, report())
    assert caplog.messages == [] and watch.counts == {}


@pytest.mark.parametrize(
    ("trouble", "kind", "key"),
    [
        (report(max_logit=150.0), "max_logit", "qk_control.clip_threshold"),
        (report(entropy=0.001), "low_entropy", "monitor.warn_min_entropy=0.02"),
        (report(entropy=0.99), "high_entropy", "monitor.warn_max_entropy=0.98"),
        (report(change=5.0), "logit_change", "optim.lr"),
    ],
)
def test_trouble_is_named_once_with_its_head_value_and_key(
    trouble: AttentionReport, kind: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    watch = AttentionWatch(MonitorConfig())
    for step in range(8):
        watch.look(step, report())
    for step in range(8, 18):
        watch.look(step, trouble if kind != "high_entropy" or step % 2 else report())
    first = caplog.messages[0]
    assert first.startswith("step 8: layer 1 head 1") or first.startswith("step 9: layer 1 head 1")
    assert key in first
    assert set(watch.counts) == {kind}
    assert len(caplog.messages) <= 2, "the first and the tenth"


def test_limits_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    off = MonitorConfig(warn_max_logit=None, warn_min_entropy=None, warn_max_entropy=None, warn_change_factor=None)
    watch = AttentionWatch(off)
    for step in range(10):
        watch.look(step, report(max_logit=math.inf, entropy=0.0, change=10.0**step))
    assert caplog.messages == []
