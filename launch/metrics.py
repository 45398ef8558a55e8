"""What a run records: metrics.jsonl, TensorBoard and the screen. Only rank 0 writes."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from configs.schema import Config
from launch.engine import StepReport
from launch.run_folder import RunFolder

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0
STRAGGLER_FACTOR = 1.3
STRAGGLER_STEPS = 50
MIN_STRAGGLER_SECONDS = 0.01


def step_record(
    step: int,
    report: StepReport,
    rates: dict[str, float],
    step_seconds: float,
    batch_tokens: int,
    flops_per_second_peak: float | None,
    flops_per_token: float,
    num_ranks: int,
) -> dict[str, Any]:
    """One line of metrics.jsonl.

    Args:
        step: finished optimizer steps, this one included.
        rates: what the optimizer used, by group.
        batch_tokens: tokens of one global batch.
        flops_per_second_peak: of one device; None gives `mfu: null`.
    """
    tokens_per_second = batch_tokens / step_seconds
    peak = flops_per_second_peak
    return {
        "step": step,
        "tokens": step * batch_tokens,
        "loss": report.loss,
        "lr": rates["decay"],
        "lr_qk": rates["query_key"],
        "grad_norm": report.grad_norm,
        "grad_norms": report.group_grad_norms,
        "z_loss": report.z_loss,
        "tokens_per_second": tokens_per_second,
        "step_seconds": step_seconds,
        "mfu": tokens_per_second * flops_per_token / (peak * num_ranks) if peak else None,
        "memory_bytes": max(report.memory_bytes),
        "data_seconds": max(report.data_seconds),
        "forward_seconds": {"min": min(report.forward_seconds), "max": max(report.forward_seconds)},
        "slowest_rank": slowest_rank(report.forward_seconds),
    }


def slowest_rank(forward_seconds: Sequence[float]) -> int | None:
    """The rank whose forward passes took clearly longer than the median's; None when all are alike.

    Forward passes hold no collective at ZeRO stages 0 to 2, so they show a rank's own speed, whereas the time of a
    whole step is the slowest rank's on every rank.
    """
    median = sorted(forward_seconds)[(len(forward_seconds) - 1) // 2]
    slowest = max(range(len(forward_seconds)), key=forward_seconds.__getitem__)
    excess = forward_seconds[slowest] - median
    if excess > MIN_STRAGGLER_SECONDS and forward_seconds[slowest] > STRAGGLER_FACTOR * median:
        return slowest
    return None


class StragglerWatch:
    """Names a rank that is clearly slower than the others over a stretch of steps; each rank once."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._num_steps = 0
        self._named: set[int] = set()

    def look(self, step: int, forward_seconds: Sequence[float]) -> None:
        """Takes one step's forward times of all ranks; speaks at the end of a stretch."""
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
                "rank %d is slow: its forward passes took %.3f s a step over the last %d steps (to %d), the fastest "
                "rank's %.3f s",
                slowest,
                means[slowest],
                STRAGGLER_STEPS,
                step,
                min(means),
            )


def drop_records_after(path: Path, step: int) -> None:
    """Rewrites metrics.jsonl without the steps beyond `step` (and without a line that a kill cut off)."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] <= step:
            kept.append(line + "\n")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


class Recorder:
    """Writes the records of a run; on ranks other than 0 it does nothing.

    Args:
        start_step: finished steps at this start; later records of an earlier start are dropped, so that metrics.jsonl
            and TensorBoard stay one curve.
        last_step: where the progress bar ends.
    """

    def __init__(self, folder: RunFolder, config: Config, start_step: int, last_step: int, active: bool) -> None:
        self._active = active
        self._last_step = last_step
        self._start_step = start_step
        if not active:
            return
        drop_records_after(folder.metrics, start_step)
        self._stream = folder.metrics.open("a", encoding="utf-8", buffering=1)
        self._writer = SummaryWriter(str(folder.tensorboard), purge_step=start_step + 1)
        if start_step == 0:
            text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
            self._writer.add_text("configuration", f"```yaml\n{text}```", 0)
        self._start_time = self._line_time = time.monotonic()
        self._stragglers = StragglerWatch()
        self._validation = ""
        self._bar: tqdm[Any] | None = None
        if sys.stdout.isatty():
            self._bar = tqdm(
                total=last_step, initial=start_step, unit="step", dynamic_ncols=True, file=sys.stdout, leave=True
            )

    def write(self, record: dict[str, Any], forward_seconds: Sequence[float]) -> None:
        """Records one step.

        Args:
            record: see `step_record`; `val_loss` keys may be among its values.
            forward_seconds: of every rank.
        """
        if not self._active:
            return
        self._stragglers.look(record["step"], forward_seconds)
        self._stream.write(json.dumps(record) + "\n")
        self._write_scalars(record)
        self._show(record)

    def close(self) -> None:
        """Closes all files."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.close()
        self._stream.close()
        self._writer.close()

    def note_checkpoint(self, step: int, seconds: float) -> None:
        """Records how long training stood still for a checkpoint."""
        if self._active:
            self._writer.add_scalar("time/checkpoint_seconds", seconds, step)

    def _write_scalars(self, record: dict[str, Any]) -> None:
        step = record["step"]
        scalars = {
            "loss/train": record["loss"],
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
        if record["z_loss"]:
            scalars["loss/z"] = record["z_loss"]
        if record["mfu"] is not None:
            scalars["throughput/mfu"] = record["mfu"]
        for key, value in record.items():
            if key == "val_loss":
                scalars["loss/validation"] = value
            elif key.startswith("val_loss/"):
                scalars[f"loss/validation_{key.removeprefix('val_loss/')}"] = value
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)

    def _show(self, record: dict[str, Any]) -> None:
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
