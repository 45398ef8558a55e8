"""Records a torch profiler trace of a few steps, for TensorBoard or Perfetto, and a memory snapshot."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from configs.schema import ProfileConfig

log = logging.getLogger(__name__)
MAX_TABLE_ROWS = 40


class StepProfiler:
    """Profiles steps [start_step, start_step + steps); does nothing without a configuration.

    Writes `rank_N.STEP.pt.trace.json` to `folder`, and on a GPU `memory_rank_N.pickle` (for pytorch.org/memory_viz), on
    a CPU `memory_rank_N.txt` (the operators that allocated most).
    """

    def __init__(
        self, config: ProfileConfig | None, folder: Path, rank: int, device: torch.device, first_step: int
    ) -> None:
        self._config = config
        self._folder = folder
        self._rank = rank
        self._device = device
        self._profiler: Any = None
        if config is not None and config.start_step < first_step:
            log.warning(
                "train.profile.start_step=%d is not profiled: this run starts at step %d", config.start_step, first_step
            )

    def before_step(self, step: int) -> None:
        """Starts the profiler if `step` (0-based) is the first profiled one."""
        if self._config is None or step != self._config.start_step:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history()
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def after_step(self, step: int) -> None:
        """Stops the profiler and writes the files if `step` is the last profiled one."""
        if self._profiler is None or self._config is None:
            return
        if step + 1 < self._config.start_step + self._config.steps:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler = self._profiler
        profiler.stop()
        trace = self._folder / f"rank_{self._rank}.{self._config.start_step}.pt.trace.json"
        profiler.export_chrome_trace(str(trace))
        if self._device.type == "cuda":
            snapshot = self._folder / f"memory_rank_{self._rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
        else:
            snapshot = self._folder / f"memory_rank_{self._rank}.txt"
            table = profiler.key_averages().table("self_cpu_memory_usage", row_limit=MAX_TABLE_ROWS)
            snapshot.write_text(table, encoding="utf-8")
        self.close()
        log.info("profile of %d steps: %s and %s", self._config.steps, trace, snapshot)

    def close(self) -> None:
        """Stops the profiler if it is running, without writing files."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if torch.autograd._profiler_enabled():
            profiler.stop()
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
