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

LOOK_SECONDS = 0.001


@dataclass
class Kill:
    """What a kill did.

    Attributes:
        victim, moment: what was killed and when, in words.
        step: finished steps at that moment, as far as they were recorded or saved.
        time: of the kill, on the monotonic clock.
        steps_redone: steps between the newest checkpoint and that moment.
        seconds_lost: from the kill until as many steps were recorded again; None where the next kill came first.
    """

    victim: str
    moment: str
    in_save: bool
    step: int
    time: float
    steps_redone: int = 0
    seconds_lost: float | None = None


class KilledRun:
    """The run that is killed: its starts, kills and what was found wrong.

    Args:
        folder: of the run.
        expected: losses of the uninterrupted run.
        tolerance: relative; 0: bit-identical.
        pace: of the uninterrupted run.
        rng: draws moments and victims.
        output: where the processes print.
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
        """One start, up to its kill, or to the end where there is no plan; then looks for faults."""
        progress = Progress(self.folder)
        attempt = Attempt(launch, _be_silent, self._output)
        kill: Kill | None = None
        try:
            if self._reaches(plan, attempt, progress):
                assert plan is not None
                kill = self._strike(plan, attempt, progress)
            attempt.wait()
            left = attempt.processes()
        finally:
            attempt.kill()
            report = attempt.close()
        if left:
            self.faults.append(f"process {', '.join(str(process.pid) for process in left)} outlived a kill")
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
        """Looks for faults of the finished run: its marker, its records, and files that the uninterrupted run lacks."""
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

    def _reaches(self, plan: Plan | None, attempt: Attempt, progress: Progress) -> bool:
        """Waits for the moment of a kill, or for the end of the attempt; whether the moment came."""
        share = self._rng.random()
        begin = time.monotonic()
        for _ in looks(attempt):
            step = progress.last_step()
            self._note_recovery(step)
            if plan is None:
                continue
            if plan.in_save:
                # Once a step is recorded, what an earlier kill left unfinished is cleaned.
                delay = 0.7 * share * self._pace.save if step >= plan.step and self._is_saving() else None
            elif plan.step > 0:
                delay = 2 * share * self._pace.step if step >= plan.step else None
            else:
                delay = max(0.0, begin + share * self._pace.start - time.monotonic()) if attempt.ranks else None
            if delay is not None:
                time.sleep(delay)
                return True
        return False

    def _strike(self, plan: Plan, attempt: Attempt, progress: Progress) -> Kill:
        """SIGKILL of one rank, or of the launcher and all ranks."""
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
        """Every committed checkpoint must be good."""
        from launch.checkpoint.files import find_faults
        from launch.run_folder.checkpoints import list_checkpoints

        for _, path in list_checkpoints(self.folder / "checkpoints"):
            self.faults += find_faults(path)


def run_uninterrupted(launch: Launch, folder: Path, last_step: int, output: IO[bytes]) -> Pace:
    """Runs to the end and measures. Raises RunError when the run fails."""
    progress = Progress(folder)
    save_seconds: list[float] = []
    begin = save_begin = time.monotonic()
    first_step = None
    was_saving = False
    attempt = Attempt(launch, _be_silent, output)
    try:
        for _ in looks(attempt):
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


def looks(attempt: Attempt) -> Iterator[None]:
    """Yields every LOOK_SECONDS until the attempt has ended. Whether it has is asked less often: that costs more."""
    while attempt.look():
        end = time.monotonic() + POLL_SECONDS
        while time.monotonic() < end:
            yield
            time.sleep(LOOK_SECONDS)


def _be_silent(message: str) -> None:
    """For the events of single attempts."""


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
