"""Records a run: metrics.jsonl, TensorBoard and progress output. Only rank 0 writes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from configs.load import leaves, to_yaml
from configs.schema import Config
from data.files import write_file
from launch.attention_control.monitor import AttentionReport
from launch.engine.step_report import StepReport
from launch.metrics.attention_record import attention_record, attention_scalars, charts, heat_maps
from launch.metrics.attention_warnings import AttentionWarnings
from launch.run_folder.folder import RunFolder

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0
STRAGGLER_FACTOR = 1.3
STRAGGLER_STEPS = 50
MIN_STRAGGLER_SECONDS = 0.01
# HPARAMS initially shows five columns: keys marked as differing between runs, by name.
FIRST_HYPERPARAMETERS = ("model.attention.kind", "model.dim", "optim.lr", "qk_control.alpha", "qk_control.policy")


def step_record(
    step: int,
    tokens: int,
    report: StepReport,
    learning_rates: dict[str, float],
    step_seconds: float,
    batch_tokens: int,
    flops_per_second_peak: float | None,
    flops_per_token: float,
    num_ranks: int,
) -> dict[str, Any]:
    """Returns one line of metrics.jsonl.

    Args:
        step: The number of finished optimizer steps, including this one.
        tokens: The number of tokens that those steps used.
        learning_rates: The learning rates that the optimizer used, by group.
        batch_tokens: The number of tokens in a global batch.
        flops_per_second_peak: The peak of one device; None gives `mfu: null`.
    """
    tokens_per_second = batch_tokens / step_seconds
    peak = flops_per_second_peak
    return {
        "step": step,
        "tokens": tokens,
        "loss": report.loss,
        "lr": learning_rates["decay"],
        "lr_qk": learning_rates["query_key"],
        "grad_norm": report.grad_norm,
        "grad_norms": report.group_grad_norms,
        **({} if report.step_applied else {"skipped": True}),
        "z_loss": report.z_loss,
        "tokens_per_second": tokens_per_second,
        "step_seconds": step_seconds,
        "mfu": tokens_per_second * flops_per_token / (peak * num_ranks) if peak else None,
        "memory_bytes": max(report.memory_bytes),
        "data_seconds": max(report.data_seconds),
        "forward_seconds": {"min": min(report.forward_seconds), "max": max(report.forward_seconds)},
        "slowest_rank": slowest_rank(report.forward_seconds),
        **(_control_record(report) if report.step_applied else {}),
        **(attention_record(report.attention) if report.attention else {}),
    }


def _control_record(report: StepReport) -> dict[str, Any]:
    """The entries of query/key control for the step; empty if it is off."""
    record = dict(report.qk_record)
    if "ratios" in report.qk_statistics:
        record["qk_ratio"] = _ratio_record(report.qk_statistics["ratios"])
    if "clip" in report.qk_statistics:
        heads, max_logit = report.qk_statistics["clip"]
        record["qk_clip"] = {"heads": int(heads), "max_logit": max_logit if math.isfinite(max_logit) else None}
    return record


def _ratio_record(ratios: list[float]) -> dict[str, Any]:
    """The step's per-head ratios, overall and by layer, from the flattened (3, L)."""
    num_layers = len(ratios) // 3
    smallest, mean, largest = (ratios[i * num_layers : (i + 1) * num_layers] for i in range(3))
    return {
        "min": min(smallest),
        "mean": sum(mean) / num_layers,
        "max": max(largest),
        "layers": {"min": smallest, "mean": mean, "max": largest},
    }


def slowest_rank(forward_seconds: Sequence[float]) -> int | None:
    """The rank whose forward passes took clearly longer than the median; None if there is none.

    At ZeRO stages 0 to 2 forward passes contain no collective and so reflect a rank's own speed, whereas every rank's
    step takes as long as the slowest rank's.
    """
    median = sorted(forward_seconds)[(len(forward_seconds) - 1) // 2]
    slowest = max(range(len(forward_seconds)), key=forward_seconds.__getitem__)
    excess = forward_seconds[slowest] - median
    if excess > MIN_STRAGGLER_SECONDS and forward_seconds[slowest] > STRAGGLER_FACTOR * median:
        return slowest
    return None


class StragglerWarnings:
    """Warns about a rank that is clearly slower than the others, averaged over many steps; once per rank."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._num_steps = 0
        self._named: set[int] = set()

    def update(self, step: int, forward_seconds: Sequence[float]) -> None:
        """Adds one step's forward times of all ranks, and checks their means every `STRAGGLER_STEPS` steps."""
        sums = self._sums or [0.0] * len(forward_seconds)
        self._sums = [total + seconds for total, seconds in zip(sums, forward_seconds, strict=True)]
        self._num_steps += 1
        if self._num_steps < STRAGGLER_STEPS:
            return
        means = [total / self._num_steps for total in self._sums]
        self._sums, self._num_steps = [], 0
        slowest = slowest_rank(means)
        if slowest is not None and slowest not in self._named:
            self._named.add(slowest)
            log.warning(
                "rank %d is slow: its forward passes took %.3f s per step over the last %d steps (until step %d), "
                "the fastest rank's %.3f s",
                slowest,
                means[slowest],
                STRAGGLER_STEPS,
                step,
                min(means),
            )


def drop_records_after(path: Path, step: int) -> None:
    """Rewrites metrics.jsonl without the steps beyond `step` and without lines that are not records."""
    if not path.exists():
        return
    lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
    kept = [line for line in lines if (found := _step_of(line)) is not None and found <= step]
    write_file(path, "".join(line + "\n" for line in kept).encode())


def _step_of(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (json.JSONDecodeError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


class Recorder:
    """Writes the records of a run. Does nothing until opened, which only rank 0 does.

    A failure to write is reported once, and training continues. metrics.jsonl is tried again at every step.

    Args:
        start_step: The number of finished steps at this start; later records of an earlier start are dropped, so that
            metrics.jsonl and TensorBoard show one curve.
        last_step: The last step, where the progress bar ends.
    """

    def __init__(self, folder: RunFolder, config: Config, start_step: int, last_step: int) -> None:
        self._folder = folder
        self._config = config
        self._start_step = start_step
        self._last_step = last_step
        self._stream: io.FileIO | None = None
        self._writer: SummaryWriter | None = None
        self._bar: tqdm[Any] | None = None
        self._stragglers = StragglerWarnings()
        self._attention = AttentionWarnings(config.monitor)
        self._next_figure = 0.0
        self._validation = ""
        self._start_time = self._line_time = time.monotonic()
        self._has_failed = False

    def open(self) -> None:
        """Opens the files. Raises OSError if that fails."""
        drop_records_after(self._folder.metrics, self._start_step)
        self._stream = io.FileIO(self._folder.metrics, "a")
        self._writer = SummaryWriter(str(self._folder.tensorboard), purge_step=self._start_step + 1)
        if self._start_step == 0:
            self._writer.add_text("configuration", f"```yaml\n{to_yaml(self._config)}```", 0)
            layout = {title: ["Multiline", tags] for title, tags in charts(self._config).items()}
            self._writer.add_custom_scalars({"Steadyhead": layout})
            self._add_hyperparameters(self._writer)
        if sys.stdout.isatty():
            self._bar = tqdm(
                total=self._last_step, initial=self._start_step, unit="step", dynamic_ncols=True, file=sys.stdout
            )

    def _add_hyperparameters(self, writer: SummaryWriter) -> None:
        """Adds the run to TensorBoard's HPARAMS, whose metrics are the ordinary scalars."""
        keys = dict(leaves(self._config.model_dump(mode="json")))
        values = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in keys.items()
        }
        experiment, start, _ = hparams(
            values, dict.fromkeys(("loss/train", "loss/validation", "attention/max_logit"), 0.0)
        )
        content = experiment.value[0].metadata.plugin_data
        shown = HParamsPluginData.FromString(content.content)
        for key in shown.experiment.hparam_infos:
            key.differs = key.name in FIRST_HYPERPARAMETERS
        content.content = shown.SerializeToString()
        for summary in (experiment, start):
            writer._get_file_writer().add_summary(summary)

    def write(self, record: dict[str, Any], report: StepReport) -> None:
        """Records one step.

        Args:
            record: See `step_record`; may also have `val_loss` keys.
            report: The report from which the record was made.
        """
        if self._stream is None:
            return
        self._stragglers.update(record["step"], report.forward_seconds)
        if report.attention is not None:
            self._attention.update(record["step"], report.attention)
            self._draw(record["step"], report.attention)
        try:
            _append_line(self._stream, json.dumps(_without_nonfinite(record)))
        except OSError as error:
            self._report_once(f"{self._folder.metrics}: step {record['step']} could not be recorded: {error}")
        self._write_scalars(record["step"], _scalars(record))
        self._print_progress(record)

    def sync(self) -> None:
        """Syncs the records to disk, so that no checkpoint is ahead of them."""
        if self._stream is None:
            return
        try:
            os.fsync(self._stream.fileno())
            if self._writer is not None:
                self._writer.flush()
        except OSError as error:
            self._report_once(f"{self._folder.path}: the records could not be written: {error}")

    def close(self) -> None:
        """Closes all files. Must not raise, since it may run after another failure."""
        if self._stream is None:
            return
        if self._bar is not None:
            self._bar.close()
        self._stream.close()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def record_checkpoint(self, step: int, seconds: float) -> None:
        """Records how long training paused for a checkpoint."""
        self._write_scalars(step, {"time/checkpoint_seconds": seconds})

    def _draw(self, step: int, attention: AttentionReport) -> None:
        """Adds heat maps of the last measurement, and of others as long as that takes at most 1% of the time."""
        every_steps = self._config.monitor.every_steps
        is_last = every_steps is not None and step + every_steps > self._last_step
        if self._writer is None or (time.monotonic() < self._next_figure and not is_last):
            return
        start = time.monotonic()
        try:
            for name, figure in heat_maps(attention).items():
                self._writer.add_figure(f"attention_heads/{name}", figure, step)
        except OSError as error:
            self._writer = None
            self._report_once(f"{self._folder.tensorboard}: step {step} could not be recorded: {error}")
        self._next_figure = time.monotonic() + 100 * (time.monotonic() - start)

    def _write_scalars(self, step: int, scalars: dict[str, float]) -> None:
        if self._writer is None:
            return
        try:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)
        except OSError as error:
            # The writer's thread has died; the run's next start creates a new one.
            self._writer = None
            self._report_once(f"{self._folder.tensorboard}: step {step} could not be recorded: {error}")

    def _report_once(self, message: str) -> None:
        if not self._has_failed:
            log.error("%s; training continues", message)
        self._has_failed = True

    def _print_progress(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if "val_loss" in record:
            self._validation = f"{record['val_loss']:.3f}"
        speed = f"{record['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            values = f"loss {record['loss']:.3f}, validation {self._validation or '-'}, {speed}"
            self._bar.set_postfix_str(values, refresh=False)
            if "val_loss" not in record:
                return
        now = time.monotonic()
        is_due = now - self._line_time >= SECONDS_BETWEEN_LINES
        if not (is_due or "val_loss" in record or step == self._last_step or step == self._start_step + 1):
            return
        self._line_time = now
        remaining = (now - self._start_time) / (step - self._start_step) * (self._last_step - step)
        validation = f"validation {record['val_loss']:.3f}  " if "val_loss" in record else ""
        log.info(
            "step %d/%d  loss %.3f  %slr %.2e  grad norm %.2f  %s  %s left",
            step,
            self._last_step,
            record["loss"],
            validation,
            record["lr"],
            record["grad_norm"],
            speed,
            tqdm.format_interval(remaining),
        )


def _without_nonfinite(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _append_line(stream: io.FileIO, line: str) -> None:
    """Appends a whole line, or raises OSError and leaves the file unchanged."""
    data = (line + "\n").encode()
    size = os.fstat(stream.fileno()).st_size
    written = stream.write(data)
    if written != len(data):
        stream.truncate(size)
        raise OSError(errno.ENOSPC, "not enough space for the record")


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """TensorBoard tag -> value."""
    scalars = {
        "loss/train": record["loss"],
        "loss/z": record["z_loss"],
        "learning_rate/base": record["lr"],
        "learning_rate/query_key": record["lr_qk"],
        "gradient_norm/all": record["grad_norm"],
        **{f"gradient_norm/{name}": norm for name, norm in record["grad_norms"].items()},
        "throughput/tokens_per_second": record["tokens_per_second"],
        "time/step_seconds": record["step_seconds"],
        "time/data_seconds": record["data_seconds"],
        "time/forward_seconds_slowest_rank": record["forward_seconds"]["max"],
        "time/forward_seconds_fastest_rank": record["forward_seconds"]["min"],
        "memory/gigabytes": record["memory_bytes"] / 1e9,
    }
    for name, value in record.get("qk_ratio", {}).items():
        if name == "layers":
            for statistic, by_layer in value.items():
                scalars.update({f"qk_ratio_layers/{layer:02d}_{statistic}": x for layer, x in enumerate(by_layer)})
        else:
            scalars[f"qk_ratio/{name}"] = value
    scalars |= attention_scalars(record)
    adaptive = record.get("qk_adaptive", {})
    for name in ("alpha", "drift", "total_drift"):
        scalars.update({f"qk_adaptive_{name}/{layer:02d}": x for layer, x in enumerate(adaptive.get(name, ()))})
    if adaptive.get("target") is not None:
        scalars["qk_adaptive/target"] = adaptive["target"]
    if "qk_clip" in record:
        scalars["qk_clip/heads"] = record["qk_clip"]["heads"]
        if record["qk_clip"]["max_logit"] is not None:
            scalars["qk_clip/max_logit"] = record["qk_clip"]["max_logit"]
    if record["mfu"] is not None:
        scalars["throughput/mfu"] = record["mfu"]
    if "val_loss" in record:
        scalars["loss/validation"] = record["val_loss"]
    by_set = {key: value for key, value in record.items() if key.startswith("val_loss/")}
    if len(by_set) > 1:
        scalars.update({f"loss/validation_{key.removeprefix('val_loss/')}": value for key, value in by_set.items()})
    return scalars
