"""What a run leaves behind: one curve, the same validation on any number of ranks, requests to stop, profiles."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.errors import EXIT_STOPPED
from launch.run_folder.checkpoints import list_checkpoints
from tests.conftest import finish, preloaded_python, python, read_metrics, start, write_shard


def scalars(run_folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def steps(run_folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_folder)]


def test_other_numbers_of_ranks_go_on_with_the_same_curve(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    """1 -> 2 -> 1 ranks at every stage, and validation losses that do not depend on the ranks."""
    stages = (0, 1, 2, 3)

    def cases(*overrides: str) -> list[tuple[Path, list[str]]]:
        return [(tiny_config, [f"run.name=s{stage}", f"deepspeed.zero_stage={stage}", *overrides]) for stage in stages]

    whole = (tiny_config, ["run.name=whole"])
    assert run_cases(1, [*cases("train.stop_step=2"), whole]) == [[0] * 5]
    assert run_cases(2, cases("train.stop_step=4")) == [[0] * 4] * 2
    assert run_cases(1, cases()) == [[0] * 4]
    expected = read_metrics(tmp_path / "runs/whole")
    for stage in stages:
        records = read_metrics(tmp_path / f"runs/s{stage}")
        assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
        for ours, reference in zip(records, expected, strict=True):
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5), stage
            if "val_loss" in reference:
                assert ours["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)


def test_validation_with_fewer_windows_than_ranks(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    """One window of validation data on two ranks: no hang, and the loss of one rank."""
    one = write_shard(tmp_path / "one", seed=5, num_tokens=40)
    settings = [f"data.val_sources={{one: {one}, two: {one}}}", "train.steps=3"]
    run_cases(1, [(tiny_config, [*settings, "run.name=ranks1"])])
    run_cases(2, [(tiny_config, [*settings, "run.name=ranks2"])])
    single, double = (read_metrics(tmp_path / f"runs/ranks{number}")[-1] for number in (1, 2))
    assert double["val_loss"] == pytest.approx(single["val_loss"], rel=1e-6)
    assert double["val_loss/one"] == double["val_loss/two"] == double["val_loss"]


def test_tensorboard_and_metrics_are_one_curve_after_a_resume(tiny_config: Path, tmp_path: Path) -> None:
    """Steps 3 and 4 are run twice, since the checkpoint is of step 2."""
    folder = tmp_path / "runs/tiny"
    assert preloaded_python("train.py", tiny_config, "train.stop_step=4", "checkpoint.every_steps=2").code == 0
    for step, path in list_checkpoints(folder / "checkpoints"):
        if step == 4:
            path.rename(tmp_path / "elsewhere")
    (folder / "DONE").unlink()
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 5, "loss": 1')  # a line that a kill cut off
    assert preloaded_python("train.py", tiny_config).code == 0
    assert steps(folder) == [1, 2, 3, 4, 5, 6]
    records = read_metrics(folder)
    assert scalars(folder, "loss/train") == [
        (record["step"], pytest.approx(record["loss"], rel=1e-6)) for record in records
    ]
    assert [step for step, _ in scalars(folder, "loss/validation")] == [3, 6]
    stalled = scalars(folder, "time/checkpoint_seconds")
    assert [step for step, _ in stalled] == [2, 6]
    assert all(0 < seconds < 60 for _, seconds in stalled)
    for tag in (
        "learning_rate/base",
        "learning_rate/query_key",
        "gradient_norm/all",
        "gradient_norm/query_key",
        "throughput/tokens_per_second",
        "time/step_seconds",
        "memory/gigabytes",
    ):
        assert len(scalars(folder, tag)) == 6, tag


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_after_a_checkpoint_and_the_run_goes_on(
    number: signal.Signals, tiny_config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs/tiny"
    process = start([sys.executable, "train.py", str(tiny_config), "train.steps=100000"])
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text()) < 2000:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    finished = finish(process, timeout=60)
    assert finished.code == EXIT_STOPPED, finished.output + finished.errors
    ((step, _),) = list_checkpoints(folder / "checkpoints")
    assert steps(folder) == list(range(1, step + 1))
    assert not (folder / "DONE").exists()
    again = preloaded_python("train.py", tiny_config, "train.steps=100000", f"train.stop_step={step + 2}")
    assert f"at step {step}" in again.output
    assert steps(folder) == list(range(1, step + 3))


def test_the_time_limit_stops_after_a_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
    finished = python("train.py", tiny_config, "train.steps=100000", "train.max_seconds=1")
    assert finished.code == EXIT_STOPPED
    assert len(list_checkpoints(tmp_path / "runs/tiny/checkpoints")) == 1


def test_a_killed_run_goes_on_from_its_last_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
    """SIGKILL at any moment; the losses equal an uninterrupted run's."""
    settings = ["train.steps=60", "checkpoint.every_steps=4", "optim.warmup_steps=0"]
    assert preloaded_python("train.py", tiny_config, *settings, "run.name=whole").code == 0
    process = start([sys.executable, "train.py", str(tiny_config), *settings])
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 13:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    finished = preloaded_python("train.py", tiny_config, *settings)
    assert finished.code == 0, finished.errors
    assert "resuming from" in finished.output
    ours, whole = read_metrics(tmp_path / "runs/tiny"), read_metrics(tmp_path / "runs/whole")
    assert [record["loss"] for record in ours] == [record["loss"] for record in whole]


def test_old_checkpoints_are_pruned(tiny_config: Path, tmp_path: Path) -> None:
    settings = "checkpoint={every_steps: 1, keep_last: 2, keep_every: 3}"
    assert preloaded_python("train.py", tiny_config, settings, "train.steps=7").code == 0
    assert [step for step, _ in list_checkpoints(tmp_path / "runs/tiny/checkpoints")] == [3, 6, 7]


def test_starting_from_another_runs_weights(tiny_config: Path, tmp_path: Path) -> None:
    assert preloaded_python("train.py", tiny_config).code == 0
    finished = preloaded_python(
        "train.py", tiny_config, "run.name=second", f"run.init_from={tmp_path}/runs/tiny", "optim.lr=1e-9"
    )
    assert finished.code == 0, finished.errors
    first, second = read_metrics(tmp_path / "runs/tiny"), read_metrics(tmp_path / "runs/second")
    assert second[0]["step"] == 1
    # With a vanishing rate, the new run's validation loss is that of the weights that it started from.
    assert second[-1]["val_loss"] == pytest.approx(first[-1]["val_loss"], rel=1e-5)


def test_a_profile_holds_the_steps_operators(tiny_config: Path, tmp_path: Path) -> None:
    assert preloaded_python("train.py", tiny_config, "train.profile={start_step: 2, steps: 2}").code == 0
    folder = tmp_path / "runs/tiny/profile"
    trace = json.loads((folder / "rank_0.2.pt.trace.json").read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any("scaled_dot_product" in name for name in names)
    assert any("adam" in name.lower() for name in names)
    assert "aten::" in (folder / "memory_rank_0.txt").read_text()


@pytest.mark.slow
def test_compiled_blocks_train_alike(tiny_config: Path, tmp_path: Path) -> None:
    settings = ["model.num_layers=1", "train.steps=2"]
    assert preloaded_python("train.py", tiny_config, *settings, "run.name=eager").code == 0
    finished = preloaded_python(
        "train.py", tiny_config, *settings, "run.name=compiled", "train.compile=true", timeout=400
    )
    assert finished.code == 0, finished.errors
    eager, compiled = (read_metrics(tmp_path / "runs" / name) for name in ("eager", "compiled"))
    for ours, reference in zip(compiled, eager, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)


def test_tokens_count_on_after_a_change_of_the_batch(tiny_config: Path, tmp_path: Path) -> None:
    assert preloaded_python("train.py", tiny_config, "train.stop_step=2").code == 0
    assert preloaded_python("train.py", tiny_config, "train.stop_step=4", "train.global_batch_tokens=512").code == 0
    assert [record["tokens"] for record in read_metrics(tmp_path / "runs/tiny")] == [256, 512, 1024, 1536]


def test_non_finite_losses_stop_at_every_stage_and_precision(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    pairs = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]
    settings = ["optim.lr=1e30", "optim.warmup_steps=0", "train.steps=20", "checkpoint.every_steps=1"]
    cases = [
        (
            tiny_config,
            [
                *settings,
                f"run.name={stage}_{precision}",
                f"deepspeed.zero_stage={stage}",
                f"train.precision={precision}",
            ],
        )
        for stage, precision in pairs
    ]
    for outcomes in run_cases(2, cases):
        assert all(isinstance(outcome, str) and "non-finite" in outcome for outcome in outcomes), outcomes
    for stage, precision in pairs:
        folder = tmp_path / f"runs/{stage}_{precision}"
        assert not (folder / "DONE").exists()
        assert all(math.isfinite(record["loss"]) for record in read_metrics(folder))


def test_weights_of_another_run_start_alike_at_every_stage(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    cases = [
        (
            tiny_config,
            [f"run.name=from_{stage}", f"deepspeed.zero_stage={stage}", f"run.init_from={tmp_path}/runs/first"],
        )
        for stage in (0, 1, 2, 3)
    ]
    outcomes = run_cases(2, [(tiny_config, ["run.name=first", "train.steps=3"]), *cases])
    assert outcomes == [[0] * 5] * 2
    runs = [read_metrics(tmp_path / f"runs/from_{stage}") for stage in (0, 1, 2, 3)]
    for records in runs[1:]:
        for ours, expected in zip(records, runs[0], strict=True):
            assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert runs[0][0]["loss"] < read_metrics(tmp_path / "runs/first")[0]["loss"]


def test_bf16_sums_gradients_in_fp32(tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    """One sequence at a time, 64 times, gives the gradient norm of all at once; bf16 sums would be off by percents."""
    names = [(stage, rows) for stage in (0, 1, 2, 3) for rows in (1, 64)]
    settings = ["train.precision=bf16", "train.global_batch_tokens=2048", "train.steps=1", "optim.warmup_steps=0"]
    cases = [
        (
            tiny_config,
            [*settings, f"run.name=s{stage}_{rows}", f"deepspeed.zero_stage={stage}", f"train.micro_batch_size={rows}"],
        )
        for stage, rows in names
    ]
    assert run_cases(1, cases) == [[0] * 8]
    norms = {name: read_metrics(tmp_path / f"runs/s{name[0]}_{name[1]}")[0]["grad_norm"] for name in names}
    for stage in (0, 1, 2, 3):
        assert norms[stage, 1] == pytest.approx(norms[stage, 64], rel=2e-3), norms
