"""The run that is killed and resumed, and the uninterrupted run that it is compared with."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from launch.errors import RunError
from launch.kill_test.losses import Losses, differences, losses
from launch.kill_test.plans import Pace, Plan
from launch.run_folder.checkpoints import is_saving, newest_checkpoint
from launch.run_folder.observe import Progress, done_step, read_records
from launch.supervisor.attempt import POLL_SECONDS, Attempt, Launch

FAST_POLL_SECONDS = 0.001


@dataclass
class Kill:
    """A kill and its cost.

    Attributes:
        victim, moment: What was killed and when, for messages.
        in_save: Whether a save was in progress.
        step: The last step that was recorded or saved before the kill.
        time: The time of the kill on the monotonic clock, in seconds.
        steps_redone: Steps from the newest checkpoint to `step`.
        seconds_lost: Seconds from the kill until `step` was recorded again; None if the next kill came first.
    """

    victim: str
    moment: str
    in_save: bool
    step: int
    time: float
    steps_redone: int = 0
    seconds_lost: float | None = None


class KilledRun:
    """The run that is killed: its starts, its kills and the faults found.

    Args:
        folder: The folder of the run.
        expected: The losses of the uninterrupted run.
        tolerance: The relative tolerance of losses; 0: bit-identical.
        pace: The pace of the uninterrupted run.
        rng: Draws the times and ranks of the kills.
        output: Where the processes print.
    """

    def __init__(
        self, folder: Path, expected: Losses, tolerance: float, pace: Pace, rng: random.Random, output: IO[bytes]
    ) -> None:
        self.folder = folder
        self.kills: list[Kill] = []
        self.faults: list[str] = []
        self._expected = expected
        self._tolerance = tolerance
        self._pace = pace
        self._rng = rng
        self._output = output

    def start(self, launch: Launch, plan: Plan | None) -> None:
        """Starts the run until the planned kill, or to the end without a plan; then looks for faults."""
        progress = Progress(self.folder)
        attempt = Attempt(launch, _ignore_event, self._output)
        kill: Kill | None = None
        try:
            if self._wait_for_plan(plan, attempt, progress):
                assert plan is not None
                kill = self._execute(plan, attempt, progress)
            attempt.wait()
            left = attempt.processes()
        finally:
            attempt.kill()
            report = attempt.close()
        if left:
            self.faults.append(f"process {', '.join(str(process.pid) for process in left)} survived a kill")
        if kill is not None:
            self.kills.append(kill)
            self._check_checkpoints()
            kill.steps_redone = kill.step - newest_checkpoint(self.folder / "checkpoints")[0]
        elif plan is not None and done_step(self.folder) is not None:
            self.faults.append(f"the run finished before kill {len(self.kills) + 1}; raise train.steps")
        elif plan is not None or done_step(self.folder) is None:
            self.faults.append(f"a start ended by itself: {report.failure()}")
        self.faults += differences(self._expected, losses(read_records(self.folder)), self._tolerance)

    def check_end(self, whole: Path) -> None:
        """Looks for faults of the finished run: its marker, its records, and files the uninterrupted run lacks."""
        last_step = max(self._expected)
        if done_step(self.folder) != last_step:
            self.faults.append(f"{self.folder}: the completion marker does not say step {last_step}")
        recorded = [record["step"] for record in read_records(self.folder)]
        if recorded != sorted(self._expected):
            self.faults.append(f"{self.folder}: the steps recorded are not 1, 2, …, {last_step}, each once")
        expected, found = ({path.name for path in (run / "checkpoints").iterdir()} for run in (whole, self.folder))
        leftovers = sorted(found ^ expected) + sorted(path.name for path in self.folder.rglob("*.tmp"))
        if leftovers:
            self.faults.append(f"{self.folder}: other files than the uninterrupted run's: {', '.join(leftovers)}")
        self._check_checkpoints()

    def _wait_for_plan(self, plan: Plan | None, attempt: Attempt, progress: Progress) -> bool:
        """Waits for the time of the kill, or for the end of the attempt. Returns whether the time came."""
        share = self._rng.random()
        begin = time.monotonic()
        for _ in poll_until_ended(attempt):
            step = progress.last_step()
            self._note_recovery(step)
            if plan is None:
                continue
            if plan.in_save:
                # Once a step is recorded, the leftovers of an earlier kill have been removed.
                delay = 0.7 * share * self._pace.save if step >= plan.step and self._is_saving() else None
            elif plan.step > 0:
                delay = 2 * share * self._pace.step if step >= plan.step else None
            else:
                delay = max(0.0, begin + share * self._pace.start - time.monotonic()) if attempt.ranks else None
            if delay is not None:
                time.sleep(delay)
                return True
        return False

    def _execute(self, plan: Plan, attempt: Attempt, progress: Progress) -> Kill:
        """Kills one rank, or the launcher and all ranks, with SIGKILL."""
        in_save = self._is_saving()
        if plan.whole_group:
            victim, targets = "all processes", attempt.processes()
        else:
            rank = self._rng.choice(sorted(attempt.ranks))
            victim, targets = f"rank {rank}", [attempt.ranks[rank]]
        now = time.monotonic()
        for process in targets:
            _kill(process)
        step = max(progress.last_step(), newest_checkpoint(self.folder / "checkpoints")[0])
        moment = "in a save" if in_save else "between saves" if progress.last_step() else "during the start"
        return Kill(victim, moment, in_save, step, now)

    def _is_saving(self) -> bool:
        return is_saving(self.folder / "checkpoints")

    def _note_recovery(self, step: int) -> None:
        if self.kills and self.kills[-1].seconds_lost is None and step >= max(1, self.kills[-1].step):
            self.kills[-1].seconds_lost = time.monotonic() - self.kills[-1].time

    def _check_checkpoints(self) -> None:
        """Verifies every committed checkpoint."""
        from launch.checkpoint.files import find_faults
        from launch.run_folder.checkpoints import list_checkpoints

        for _, path in list_checkpoints(self.folder / "checkpoints"):
            self.faults += find_faults(path)


def run_uninterrupted(launch: Launch, folder: Path, last_step: int, output: IO[bytes]) -> Pace:
    """Runs to the end and measures the pace. Raises RunError when the run fails."""
    progress = Progress(folder)
    save_seconds: list[float] = []
    begin = save_begin = time.monotonic()
    first_step = None
    was_saving = False
    attempt = Attempt(launch, _ignore_event, output)
    try:
        for _ in poll_until_ended(attempt):
            now = time.monotonic()
            if first_step is None and progress.last_step() > 0:
                first_step = now
            saving = is_saving(folder / "checkpoints")
            if saving and not was_saving:
                save_begin = now
            elif was_saving and not saving:
                save_seconds.append(now - save_begin)
            was_saving = saving
    finally:
        attempt.kill()
        report = attempt.close()
    if done_step(folder) != last_step:
        raise RunError(f"the uninterrupted run failed: {report.failure()}")
    step_seconds = [record["step_seconds"] for record in read_records(folder)]
    return Pace((first_step or begin) - begin, statistics.median(step_seconds), statistics.median(save_seconds or [0]))


def poll_until_ended(attempt: Attempt) -> Iterator[None]:
    """Yields every FAST_POLL_SECONDS until the attempt has ended, which is checked less often since it costs more."""
    while attempt.poll():
        end = time.monotonic() + POLL_SECONDS
        while time.monotonic() < end:
            yield
            time.sleep(FAST_POLL_SECONDS)


def _ignore_event(message: str) -> None:
    """Ignores the events of attempts."""


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
