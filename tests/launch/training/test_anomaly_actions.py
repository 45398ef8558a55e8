"""Non-finite steps and spikes: stopping with the samples named, skipping, and going back to a checkpoint.

What spoils the runs is in their data. One token occurs once, and helpers/worker.py gives its micro-batch a loss that
is NaN; and for one step a phase reads random tokens, which nothing in the pattern of the others predicts.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from data.indexed import IndexedShardWriter, token_dtype
from data.order import SampleOrder
from data.source import TokenSource
from launch.checkpoint.files import MANIFEST, STATE, CheckpointReader, file_entry, read_state
from tests.conftest import POISON, VOCAB_SIZE, read_metrics

SEQ_LEN, SAMPLES_PER_STEP, STEPS = 32, 8, 14
BAD_DOCUMENT = 9


def write_tokens(prefix: Path, poisoned: bool = False, random: bool = False) -> Path:
    """Sixteen documents that count upwards from anywhere; one may hold the poison, or all tokens be random."""
    rng = np.random.default_rng(5)
    with IndexedShardWriter(prefix, token_dtype(VOCAB_SIZE)) as writer:
        for number in range(16):
            tokens = (rng.integers(VOCAB_SIZE) + np.arange(300)) % VOCAB_SIZE
            if poisoned and number == BAD_DOCUMENT:
                tokens[40] = POISON
            writer.add_document(rng.integers(VOCAB_SIZE, size=300) if random else tokens)
    return prefix


def step_of_poison(prefix: Path, seed: int) -> int:
    """The step (from 1) that reads the poison first."""
    source = TokenSource.open(prefix)
    order = SampleOrder([source.num_windows(SEQ_LEN)], [1.0], seed)
    window = np.empty(SEQ_LEN + 1, np.int64)
    for sample, number in enumerate(order.locate(np.arange(1000)).window.tolist()):
        source.read_window(number, SEQ_LEN, window)
        if POISON in window[:-1]:
            return sample // SAMPLES_PER_STEP + 1
    raise AssertionError("the poison is in the source")


def refresh_manifest(file: Path) -> None:
    """Makes a checkpoint whose file was changed verify again."""
    manifest = json.loads((file.parent / MANIFEST).read_text())
    manifest["files"][file.name] = file_entry(file)
    (file.parent / MANIFEST).write_text(json.dumps(manifest))


def weights_and_moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    with CheckpointReader(checkpoint) as reader:
        for name, shape in reader.state.parameters.items():
            for kind in ("master", *reader.optimizer_tensors(name)):
                tensors[f"{kind}/{name}"] = torch.empty(math.prod(shape))
                reader.read_range(kind, name, tensors[f"{kind}/{name}"], 0)
        tensors |= {key: torch.tensor(value) for key, value in reader.state.optimizer_scalars.items()}
    return tensors


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(run)}


def test_bad_steps_stop_skip_or_go_back(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    runs = tmp_path / "runs"
    prefix = write_tokens(tmp_path / "poisoned", poisoned=True)
    seed = next(seed for seed in itertools.count() if step_of_poison(prefix, seed) == 8)
    content = yaml.safe_load(tiny_config.read_text())
    content["run"]["seed"] = seed
    content["model"]["vocab_size"] = VOCAB_SIZE + 1
    content["data"]["sources"] = [{"path": str(prefix)}]
    content["train"]["steps"] = STEPS
    content["checkpoint"] = {"every_steps": 1, "keep_last": 100}
    content["monitor"] = {"probe_sequences": 1, "every_steps": 2}
    tiny_config.write_text(yaml.safe_dump(content))

    def case(name: str, *more: str) -> tuple[Path, list[str]]:
        return tiny_config, [f"run.name={name}", *more]

    def at(stage: int, precision: str) -> list[str]:
        return [f"deepspeed.zero_stage={stage}", f"train.precision={precision}"]

    combinations = [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")]
    dropped = (3, "fp32")  # here DeepSpeed drops the step itself
    skip = ["train.on_nonfinite=skip", "train.stop_step=9"]
    skips = [case(f"skip_{s}_{p}", *at(s, p), *skip) for s, p in [*combinations, dropped]]
    controlled = ["qk_control.policy=quack", "qk_control.clip_threshold=0.5", "optim.name=muon"]
    skips += [case(f"skip_muon_{s}", *at(s, "fp32"), *controlled, *skip) for s in (0, 1)]
    skips.append(case("skip_adaptive", "qk_control.policy=adaptive", *skip))
    back = ["train.on_nonfinite=rollback", "checkpoint.every_steps=5"]
    backs = [case(f"back_{s}_{p}", *at(s, p), *back) for s, p in combinations]
    start_again = case("start_again", *back, "checkpoint.every_steps=100")
    # Last, since DeepSpeed's autocast stays on in a process, and changes the gradients of a later engine.
    autocast = case("skip_0_bf16", *at(0, "bf16"), *skip)
    outcomes = run_cases(2, [case("stop"), start_again, *skips, *backs, autocast], timeout=600)
    assert outcomes[0] == outcomes[1]
    stopped, *finished = outcomes[0]
    assert finished == [0] * (len(skips) + len(backs) + 2)
    skips.append(autocast)

    assert "non-finite loss at step 8 on rank" in stopped and "\n" not in stopped
    assert f"trained on {prefix}.bin document" in stopped
    assert f"the last good checkpoint is {runs}/stop/checkpoints/step_00000007" in stopped
    found = [json.loads(line) for line in (runs / "stop/bad_batches/step_00000008.jsonl").read_text().splitlines()]
    assert len(found) == 2  # one micro-batch of one rank
    documents = [piece["documents"] for record in found for piece in record["pieces"]]
    assert any(first <= BAD_DOCUMENT <= last for first, last in documents)
    assert {record["source"] for record in found} == {str(prefix)}
    assert all(7 * SAMPLES_PER_STEP <= record["sample"] < 8 * SAMPLES_PER_STEP for record in found)
    assert all(record["sample"] == record["place"] for record in found)

    for _, (name, *_) in skips:
        run = runs / name.removeprefix("run.name=")
        records = read_metrics(run)
        assert [record["step"] for record in records if record.get("skipped")] == [8], run
        assert records[7]["loss"] is None
        assert [record["step"] for record in records if "attention" in record] == [2, 4, 6]
        assert all(math.isfinite(record["loss"]) for record in records[:7] + records[8:])
        before, after, later = (weights_and_moments(run / f"checkpoints/step_{step:08d}") for step in (7, 8, 9))
        assert all(torch.equal(before[key], after[key]) for key in before), run
        assert not all(torch.equal(before[key], later[key]) for key in before)
        assert len(list((run / "bad_batches").iterdir())) == 1
    progress = [
        read_state(runs / f"skip_adaptive/checkpoints/step_{step:08d}").policy_state["progress"] for step in (7, 8, 9)
    ]
    assert progress[0] == progress[1] < progress[2]

    end = read_state(runs / f"start_again/checkpoints/step_{STEPS:08d}")
    assert end.skipped_samples == [[0, 8 * SAMPLES_PER_STEP]]
    assert "rolling back to the start of the run (1 of" in (runs / "start_again/log.txt").read_text()

    skipped = [[5 * SAMPLES_PER_STEP, 8 * SAMPLES_PER_STEP]]
    resumed = []
    for _, (name, *rest) in backs:
        run = runs / name.removeprefix("run.name=")
        assert list(losses(run)) == list(range(1, STEPS + 1))
        assert all(math.isfinite(loss) for loss in losses(run).values())
        state = json.loads((run / f"checkpoints/step_{STEPS:08d}" / STATE).read_text())
        assert state["skipped_samples"] == skipped
        assert state["consumed_samples"] == STEPS * SAMPLES_PER_STEP
        # A new process that resumes from the checkpoint and leaves out the same samples.
        other = run.with_name(f"{run.name}_resumed")
        shutil.copytree(run / "checkpoints/step_00000005", other / "checkpoints/step_00000005")
        shutil.copy(run / "metrics.jsonl", other)
        shutil.copy(run / "config.yaml", other)
        path = other / "checkpoints/step_00000005" / STATE
        path.write_text(json.dumps(json.loads(path.read_text()) | {"skipped_samples": skipped}))
        refresh_manifest(path)
        resumed.append((tiny_config, [f"run.name={other.name}", *rest]))
    # A rollback of a run that resumed from another folder's checkpoint returns to that one.
    elsewhere = runs / "back_1_bf16/checkpoints/step_00000005"
    path = tmp_path / "step_00000005"
    shutil.copytree(elsewhere, path)
    shutil.copytree(runs / "stop/checkpoints/step_00000004", runs / "branch/checkpoints/step_00000004")
    # A profile is cut off by a rollback and does not go on behind it.
    profiled = case("profiled", *at(1, "fp32"), *back, "train.profile={start_step: 3, steps: 10}")
    branch = case("branch", *at(1, "bf16"), *back, f"run.resume={path}", "optim.weight_decay=0.05")
    changed = case("changed", *at(1, "bf16"), f"run.resume={path}", "optim.weight_decay=0.05", "train.stop_step=6")
    assert run_cases(2, [*resumed, branch, changed, profiled]) == [[0] * (len(resumed) + 3)] * 2
    for _, (name, *_) in backs:
        run = runs / name.removeprefix("run.name=")
        assert losses(run) == losses(run.with_name(f"{run.name}_resumed")), run
    assert f"rolling back to {path} " in (runs / "branch/log.txt").read_text()
    assert read_state(runs / f"branch/checkpoints/step_{STEPS:08d}").skipped_samples == skipped
    log = (runs / "changed/log.txt").read_text()
    assert "configuration changed since the checkpoint: optim.weight_decay: 0.1 -> 0.05" in log


def test_spikes_are_told_skipped_or_left_behind(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    """All samples of step 10 are random tokens."""
    runs = tmp_path / "runs"
    usual, noise = write_tokens(tmp_path / "usual"), write_tokens(tmp_path / "noise", random=True)
    batch_tokens = SEQ_LEN * SAMPLES_PER_STEP
    content = yaml.safe_load(tiny_config.read_text())
    content["data"]["sources"] = [{"path": str(usual)}]
    content["data"]["phases"] = [
        {"start_tokens": 9 * batch_tokens, "sources": [{"path": str(noise)}]},
        {"start_tokens": 10 * batch_tokens, "sources": [{"path": str(usual)}]},
    ]
    content["train"] |= {"steps": STEPS, "spike": {"window": 8, "threshold_sigma": 2.0}}
    content["checkpoint"] = {"every_steps": 4, "keep_last": 100}
    tiny_config.write_text(yaml.safe_dump(content))
    actions = ("warn", "skip", "rollback")
    cases = [(tiny_config, [f"run.name={action}", f"train.spike.action={action}"]) for action in actions]
    off = (tiny_config, ["run.name=ignored", "train.spike.threshold_sigma=null"])
    outcomes = run_cases(
        2,
        [
            *cases,
            off,
            (
                tiny_config,
                [
                    "run.name=often",
                    "train.spike.action=rollback",
                    "train.spike.threshold_sigma=0.001",
                    "train.spike.window=2",
                ],
            ),
        ],
    )
    assert outcomes[0][:-1] == [0] * 4
    assert "has already rolled back to" in outcomes[0][-1] and "3 times (train.max_rollbacks)" in outcomes[0][-1]

    warned, skipped, back, ignored = (losses(runs / name) for name in (*actions, "ignored"))
    assert warned == ignored
    for name in actions:
        log = (runs / name / "log.txt").read_text()
        assert log.count("spike at step") == 1, log
        assert "spike at step 10: loss " in log
        assert f"trained on {noise}.bin document" in log
    assert "spike at" not in (runs / "ignored/log.txt").read_text()
    assert {step: skipped[step] for step in range(1, 11)} == {step: warned[step] for step in range(1, 11)}
    assert skipped[11] != warned[11]
    assert [record["step"] for record in read_metrics(runs / "skip") if record.get("skipped")] == [10]
    assert max(back.values()) == back[1]
    state = json.loads((runs / f"rollback/checkpoints/step_{STEPS:08d}" / STATE).read_text())
    assert state["skipped_samples"] == [[8 * SAMPLES_PER_STEP, 10 * SAMPLES_PER_STEP]]
    assert len(state["step_figures"]["loss"]) == 8


def test_skips_are_bounded_and_batches_without_targets_are_none(
    tiny_config: Path, tmp_path: Path, run_cases: Any
) -> None:
    runs = tmp_path / "runs"
    everywhere = tmp_path / "everywhere"
    with IndexedShardWriter(everywhere, token_dtype(VOCAB_SIZE)) as writer:
        writer.add_document(np.full(2000, POISON))
    single = tmp_path / "single"
    with IndexedShardWriter(single, token_dtype(VOCAB_SIZE)) as writer:
        for token in range(600):
            writer.add_document(np.array([token % VOCAB_SIZE]))
    settings = ["model.vocab_size=97", "monitor.every_steps=null", "validation.every_steps=100", "data.val_sources={}"]
    endless = [f"data.sources=[{{path: {everywhere}}}]", "train.on_nonfinite=skip", "train.max_skips=2"]
    usual = write_tokens(tmp_path / "usual")
    phases = (
        f"[{{start_tokens: 512, sources: [{{path: {single}}}]}}, {{start_tokens: 768, sources: [{{path: {usual}}}]}}]"
    )
    masked = [f"data.sources=[{{path: {usual}}}]", f"data.phases={phases}", "data.mask_documents=true"]
    cases = [
        (tiny_config, ["run.name=endless", *settings, *endless]),
        (tiny_config, ["run.name=unjudged", *settings, *masked]),
        (tiny_config, ["run.name=judged", *settings, *masked, "train.spike.action=skip"]),
        (
            tiny_config,
            ["run.name=huge", *settings, "optim.lr=1e39", "optim.warmup_steps=0", "checkpoint.every_steps=1"],
        ),
    ]
    ((endless_outcome, *finished, huge_outcome),) = run_cases(1, cases)
    assert "non-finite loss at step 3" in endless_outcome
    assert "the 2 steps before it were skipped, too (train.max_skips)" in endless_outcome
    assert finished == [0, 0]
    assert losses(runs / "judged") == losses(runs / "unjudged")
    assert losses(runs / "judged")[3] == 0.0
    # Weights that are not finite are in no checkpoint.
    assert "non-finite" in huge_outcome and "there is no checkpoint yet" in huge_outcome
    assert "could not be saved" in (runs / "huge/log.txt").read_text()
    assert "has non-finite weights" in (runs / "huge/log.txt").read_text()
