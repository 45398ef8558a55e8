"""Real runs with document masks equal plain loops; with changing mixtures they go on after a stop on other ranks."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from configs.load import load_config
from configs.schema import Config
from data.indexed import IndexedShardWriter, token_dtype
from data.order import SampleOrder
from launch.hf.model_card import data_values
from launch.optim.schedule import learning_rate
from launch.training.data import describe_data, list_sources, open_data
from model.gpt import GPT
from model.initialisation import initialise
from tests.conftest import VOCAB_SIZE, read_metrics

NUM_STEPS = 3
SAMPLES_PER_STEP = 7  # no number of ranks or rows divides it
SEQ_LEN = 32


def write_documents(prefix: Path, seed: int, num_documents: int = 300) -> tuple[Path, list[int], np.ndarray]:
    """(prefix, lengths, all tokens) of a shard of short documents, without end-of-document tokens."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 40, num_documents).tolist()
    tokens = generator.integers(0, VOCAB_SIZE, sum(lengths))
    with IndexedShardWriter(prefix, token_dtype(VOCAB_SIZE)) as writer:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add_document(document)
    return prefix, lengths, tokens


def window_loss(
    model: GPT, tokens: np.ndarray, lengths: list[int], window: int, eod_loss: bool
) -> tuple[torch.Tensor, int]:
    """(sum of losses, targets) of a window, one document after the other, each alone."""
    start, stop = window * SEQ_LEN, (window + 1) * SEQ_LEN
    ends = np.cumsum(lengths).tolist()
    bounds = sorted({start, stop, *(end for end in ends if start < end < stop)})
    total, count = torch.zeros(()), 0
    for first, last in pairwise(bounds):
        # The window's last token has a target if the document continues after the window.
        whole = torch.from_numpy(tokens[first : last + 1 if last == stop and stop not in ends else last])
        targets = whole[1:].clone()
        if not eod_loss and first + len(whole) in ends:
            targets = targets[:-1]
        if len(targets):
            logits = model.logits(whole[None, :-1])[0, : len(targets)].double()
            total = total + F.cross_entropy(logits, targets, reduction="sum")
            count += len(targets)
    return total, count


def plain_run(config: Config, train: tuple, val: tuple) -> list[dict[str, float]]:
    """Losses and gradient norms of a loop in plain PyTorch, document by document."""
    model = GPT(config.model)
    initialise(model, config.run.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=config.optim.betas, eps=config.optim.eps, weight_decay=0.0, foreach=False
    )
    num_windows = [(len(source[2]) - 1) // SEQ_LEN for source in (train, val)]
    order = SampleOrder(num_windows[:1], [1.0], config.run.seed)
    eod_loss = config.data.eod_loss
    records = []
    for step in range(NUM_STEPS):
        windows = order.locate(np.arange(step * SAMPLES_PER_STEP, (step + 1) * SAMPLES_PER_STEP)).window.tolist()
        parts = [window_loss(model, train[2], train[1], window, eod_loss) for window in windows]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train.steps, config.optim)
        optimizer.step()
        optimizer.zero_grad()
        records.append({"loss": loss.item(), "grad_norm": norm.item()})
    with torch.no_grad():
        count = min(config.validation.batches * SAMPLES_PER_STEP, num_windows[1])
        parts = [window_loss(model, val[2], val[1], n * num_windows[1] // count, eod_loss) for n in range(count)]
    records[-1]["val_loss"] = float(sum(part for part, _ in parts)) / sum(count for _, count in parts)
    return records


def test_masked_training_equals_a_loop_over_single_documents(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    """At every stage, on one and two ranks, with rows of padding, whatever the micro-batch; and clipping watches."""
    train, val = write_documents(tmp_path / "docs", 1), write_documents(tmp_path / "val_docs", 2)
    settings = [
        f"train.steps={NUM_STEPS}",
        f"train.global_batch_tokens={SAMPLES_PER_STEP * SEQ_LEN}",
        "optim={lr: 5e-3, warmup_steps: 2, weight_decay: 0, grad_clip: 0}",
        f"data.sources=[{{path: {train[0]}}}]",
        f"data.val_sources={{held_out: {val[0]}}}",
        "data.mask_documents=true",
    ]
    kinds = {
        "mha": ["model.attention.ssmax=true", "qk_control.clip_threshold=1e6"],
        "mla": ["model.attention={kind: mla, sink: true, qk_norm: true}", "data.eod_loss=false"],
    }
    cases = {
        f"{kind}_{stage}_{rows}": [
            *settings,
            *options,
            f"deepspeed.zero_stage={stage}",
            f"train.micro_batch_size={rows}",
            f"train.activation_checkpointing={'true' if rows == 1 else 'false'}",
        ]
        for kind, options in kinds.items()
        for stage, rows in ((0, 2), (1, 7), (2, 3), (3, 1))
    }
    chosen = {1: [name for name in cases if "_1_" in name], 2: list(cases)}
    for num_ranks, names in chosen.items():
        named = [(tiny_config, [*cases[name], f"run.name={name}_{num_ranks}"]) for name in names]
        assert run_cases(num_ranks, named) == [[0] * len(names)] * num_ranks
    for kind, options in kinds.items():
        expected = plain_run(load_config(tiny_config, [*settings, *options]), train, val)
        for num_ranks, names in chosen.items():
            for name in (name for name in names if name.startswith(kind)):
                records = read_metrics(tmp_path / f"runs/{name}_{num_ranks}")
                for found, reference in zip(records, expected, strict=True):
                    for key, value in reference.items():
                        assert found[key] == pytest.approx(value, rel=2e-5), (name, num_ranks, key)


def phases(*entries: tuple[int, dict[Path, float]]) -> str:
    """The override `data.phases=…` of (start_tokens, path -> weight)."""
    listed = []
    for start_tokens, weights in entries:
        sources = ", ".join(f"{{path: {path}, weight: {weight}}}" for path, weight in weights.items())
        listed.append(f"{{start_tokens: {start_tokens}, sources: [{sources}]}}")
    return f"data.phases=[{', '.join(listed)}]"


def losses(run_folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run_folder)]


def test_phases_survive_a_stop_and_other_ranks(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    """A phase begins within a step, and a source comes back; past phases are fixed, later ones are not."""
    a, b, c = (write_documents(tmp_path / name, seed)[0] for seed, name in enumerate("abc"))
    base = [f"data.sources=[{{path: {a}}}, {{path: {b}, weight: 2}}]", "train.steps=6"]
    first, second = (300, {c: 1, a: 3}), (1000, {b: 1})  # samples 10 and 32 of 48; the stop is at 24
    planned = [*base, phases(first, second)]
    outcomes = run_cases(
        1,
        [
            (tiny_config, [*planned, "run.name=whole"]),
            (tiny_config, [*planned, "run.name=parts", "train.stop_step=3"]),
            (tiny_config, [*base, phases(first), "run.name=late", "train.stop_step=3"]),
            (tiny_config, [*base, "run.name=unplanned"]),
        ],
    )
    assert outcomes == [[0, 0, 0, 0]]
    os.symlink(tmp_path / "c.bin", tmp_path / "moved.bin")
    os.symlink(tmp_path / "c.idx", tmp_path / "moved.idx")
    moved = (300, {tmp_path / "moved": 1, a: 3})
    changed = {
        "weight": [first[0], {c: 2, a: 3}],
        "start": [299 + 32, first[1]],
        "data": [300, {b: 1, a: 3}],
    }
    refused = [[*base, phases(tuple(one), second), "run.name=parts"] for one in changed.values()]
    refused += [[*base, phases((100, {a: 1}), first, second), "run.name=parts"], [*base, "run.name=parts"]]
    resumed = [
        [*base, phases(moved, second), "run.name=parts"],
        [*planned, "run.name=late"],  # the second phase was thought of after the stop
    ]
    outcomes = run_cases(2, [(tiny_config, case) for case in [*refused, *resumed]])
    for rank_outcomes in outcomes:
        assert rank_outcomes[-2:] == [0, 0]
        for message in rank_outcomes[:-2]:
            assert "data.phases: for the first 768 tokens, the run used: from token 320" in message
            assert "\n" not in message
    assert "now configured: no phases;" in outcomes[0][4]
    for name in ("parts", "late"):
        assert losses(tmp_path / f"runs/{name}") == pytest.approx(losses(tmp_path / "runs/whole"), rel=1e-5)
    found, expected = losses(tmp_path / "runs/unplanned"), losses(tmp_path / "runs/whole")
    assert found[0] == expected[0]
    assert found[1] != expected[1], "the first phase begins with the third sample of the second step"


def test_sources_and_phases_are_described(tiny_config: Path, tmp_path: Path) -> None:
    (a, _, tokens_a), (b, *_), (c, *_) = (write_documents(tmp_path / name, seed) for seed, name in enumerate("abc"))
    overrides = [
        f"data.sources=[{{path: {a}}}, {{path: {b}}}]",
        phases((32 * 4096, {c: 1, a: 3}), (10**9, {b: 1})),
        "train.steps=1024",
    ]
    config = load_config(tiny_config, overrides)
    paths, _ = list_sources(config)
    assert paths == {"data.sources.0": str(a), "data.sources.1": str(b), "data.phases.0.sources.0": str(c)}
    data, config = open_data(config)
    lines = describe_data(data, config)
    # 8,192 samples: a block of half a and half b, a block of three quarters a and one quarter c.
    epochs = (2048 + 3072) / ((len(tokens_a) - 1) // 32)
    assert lines[0] == (
        f"data a: {len(tokens_a):,} tokens; supplies {5120 * 32:,} tokens (62.5% of the run), {epochs:.2f} epochs"
    )
    assert "supplies 65,536 tokens (25.0% of the run)" in lines[1]
    assert "supplies 32,768 tokens (12.5% of the run)" in lines[2]
    assert lines[3] == "data phase 0, from token 0 (step 0): a 50.0%, b 50.0%"
    assert lines[4] == "data phase 1, from token 131,072 (step 512): c 25.0%, a 75.0%"
    assert lines[5] == "data phase 2, from token 1,000,000,000 (step 3,906,250), which the run does not reach: b 100.0%"


def test_the_model_card_names_the_sources_of_all_phases(tiny_config: Path, tmp_path: Path) -> None:
    a, b = (write_documents(tmp_path / name, seed)[0] for seed, name in enumerate("ab"))
    data, config = open_data(
        load_config(
            tiny_config, [f"data.sources=[{{path: {a}, weight: 2}}]", phases((100, {b: 1}), (320, {b: 3, a: 0.5}))]
        )
    )
    state: Any = SimpleNamespace(data_fingerprints=list(data.fingerprints), tokenizer_sha256=None)
    values = data_values(config, state)
    assert [row[1:3] for row in values["source_rows"]] == [("2, then 0, then 0.5", "?"), ("0, then 1, then 3", "?")]
    assert [row[0][-2:] for row in values["source_rows"]] == ["/a", "/b"]
    assert values["weight_changes"] == ["128", "320"]


def test_the_same_path_twice_is_two_sources(tiny_config: Path, tmp_path: Path) -> None:
    a = write_documents(tmp_path / "a", 0)[0]
    twice = f"[{{path: {a}}}, {{path: {a}}}]"
    config = load_config(
        tiny_config, [f"data.sources={twice}", f"data.phases=[{{start_tokens: 64, sources: {twice}}}]"]
    )
    paths, listed = list_sources(config)
    assert list(paths) == ["data.sources.0", "data.sources.1"]
    assert [phase.sources for phase in listed] == [(0, 1), (0, 1)]
