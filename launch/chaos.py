"""Kills a run again and again, lets it go on each time, and compares every loss with an uninterrupted run's.

Half of the kills fall inside a save. Both runs lie in RUN-chaos/ beside the run's own folder, which is not touched. The
losses must be bit-identical on the same number of ranks; with --ranks 2,1,3 that number changes at each start, and
they must agree within 1e-5. After every kill no process may be left, and every committed checkpoint must verify; at
the end no unfinished file may be left. Exit codes: 0 all of that holds, 1 not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import Config
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USAGE, RunError
from launch.run import add_run_arguments, choose_num_ranks, positive_integer
from launch.run_folder.checkpoints import is_saving, newest_checkpoint
from launch.run_folder.observe import Progress, done_step, read_records
from launch.supervisor.attempt import LAUNCHERS, POLL_SECONDS, Attempt, Launch

TOLERANCE = 1e-5  # relative, between different numbers of ranks in fp32
LOOK_SECONDS = 0.001
UNINTERRUPTED, KILLED, OUTPUT = "uninterrupted", "killed", "output.log"  # in RUN-chaos/

Losses = dict[int, dict[str, float]]  # step -> name -> value


@dataclass(frozen=True)
class Plan:
    """One kill to come.

    Attributes:
        step: kill once so many steps are recorded (0: during the start), or inside the save of this step.
        in_save: which of the two.
        whole_group: all processes at once, or one random rank.
    """

    step: int
    in_save: bool
    whole_group: bool


@dataclass(frozen=True)
class Pace:
    """Seconds that the uninterrupted run took to its first step, for a step and for a save."""

    start: float
    step: float
    save: float


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit code."""
    options = parse_arguments(arguments)
    try:
        config = load_config(options.config, options.overrides)
        ranks = options.ranks or [options.num_ranks]
        for number in ranks:
            choose_num_ranks(launcher_for(options.launcher, number), number)
        if len(set(ranks)) > 1 and config.train.precision != "fp32":
            raise ConfigError(["--ranks: losses of different numbers of ranks agree only with train.precision=fp32"])
        parent = make_folder(config)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with (parent / OUTPUT).open("ab") as output:
            return run(options, config, parent, ranks, output)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
    return EXIT_FAILURE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.chaos", description=__doc__)
    add_run_arguments(parser)
    parser.add_argument("--kills", type=positive_integer, default=20, metavar="K", help="default: 20")
    parser.add_argument("--num-ranks", type=positive_integer, default=2, metavar="N", help="processes; default: 2")
    parser.add_argument("--ranks", type=rank_list, metavar="N,N,…", help="processes of each start in turn, e.g. 2,1,3")
    parser.add_argument("--launcher", choices=LAUNCHERS[:2], default="torchrun", help="default: torchrun")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments and victims; default: 0")
    return parser.parse_intermixed_args(arguments)


def rank_list(text: str) -> list[int]:
    """For argparse: `2,1,3`."""
    return [positive_integer(part) for part in text.split(",")]


def launcher_for(launcher: str, num_ranks: int) -> str:
    """One rank needs no launcher, and starts faster without."""
    return "python" if num_ranks == 1 else launcher


def make_folder(config: Config) -> Path:
    """The empty RUN-chaos/; what an earlier call left there is deleted.

    Raises:
        ConfigError: there is something else in it.
    """
    parent = Path(config.run.dir) / f"{config.run.name}-chaos"
    strays = sorted(path.name for path in parent.glob("*") if path.name not in (UNINTERRUPTED, KILLED, OUTPUT))
    if strays:
        raise ConfigError([f"{parent}: holds {strays[0]}, which is not of this command; move it away"])
    if parent.exists():
        shutil.rmtree(parent)
    parent.mkdir(parents=True)
    return parent


def run(options: argparse.Namespace, config: Config, parent: Path, ranks: list[int], output: IO[bytes]) -> int:
    """The uninterrupted run, then the killed one; prints the table and returns the exit code."""

    def launch(name: str, num_ranks: int) -> Launch:
        settings = (f"run.dir={json.dumps(str(parent))}", f"run.name={name}", "run.resume=auto")
        launcher = launcher_for(options.launcher, num_ranks)
        return Launch(launcher, num_ranks, (options.config, *options.overrides, *settings))

    last_step = config.train.last_step
    whole = parent / UNINTERRUPTED
    say(f"first {last_step} steps without kills, with {count_ranks(ranks[0])}; what the runs print is in {output.name}")
    pace = run_uninterrupted(launch(UNINTERRUPTED, ranks[0]), whole, last_step, output)
    say(f"{pace.start:.1f} s to the first step, {pace.step:.3f} s a step, {pace.save:.3f} s a save")
    tolerance = TOLERANCE if len(set(ranks)) > 1 else 0.0
    rng = random.Random(options.seed)
    killed = KilledRun(parent / KILLED, losses(read_records(whole)), tolerance, pace, rng, output)
    plans = [*make_plans(rng, options.kills, last_step, config.checkpoint.every_steps), None]
    for number, plan in enumerate(plans):
        num_ranks = ranks[number % len(ranks)]
        killed.start(launch(KILLED, num_ranks), plan)
        if killed.faults:
            break
        if plan is not None:
            kill = killed.kills[-1]
            what = f"{kill.victim} of {num_ranks}" if kill.victim.startswith("rank") else kill.victim
            say(f"kill {number + 1} of {options.kills}: {what}, at step {kill.step}, {kill.moment}")
    else:
        killed.check_end(whole)
    print_table(killed.kills)
    for fault in killed.faults:
        print(f"error: {fault}", file=sys.stderr)
    if killed.faults:
        return EXIT_FAILURE
    how = "bit-identical to" if tolerance == 0 else f"within {tolerance:g} of"
    say(f"all {last_step} steps have losses {how} the uninterrupted run's")
    return EXIT_DONE


def make_plans(rng: random.Random, num_kills: int, last_step: int, every_steps: int) -> list[Plan]:
    """Random kills in the order of their steps, so that each is reached; every second one is inside a save.

    None is in the last save where there are others, nor just before the end: the run might finish first.
    """
    save_steps = range(every_steps, last_step, every_steps) or [last_step]
    plans = []
    for number in range(num_kills):
        in_save = number % 2 == 0
        step = rng.choice(save_steps) if in_save else rng.randrange(max(1, last_step - 3))
        plans.append(Plan(step, in_save, whole_group=rng.random() < 0.5))
    return sorted(plans, key=lambda plan: (plan.step, plan.in_save))


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


def losses(records: Sequence[Mapping[str, Any]]) -> Losses:
    """Training and validation losses of every step."""
    return {
        record["step"]: {key: value for key, value in record.items() if key == "loss" or key.startswith("val_loss")}
        for record in records
    }


def differences(expected: Losses, found: Losses, tolerance: float) -> list[str]:
    """One line for the first of the found steps whose losses differ; none when all agree."""
    for step, values in found.items():
        wanted = expected.get(step, {})
        agree = values.keys() == wanted.keys() and all(
            # None stands for a figure that is not finite.
            values[key] == wanted[key]
            or (None not in (values[key], wanted[key]) and math.isclose(values[key], wanted[key], rel_tol=tolerance))
            for key in values
        )
        if not agree:
            return [f"step {step}: the losses are {values}, and without kills {wanted}"]
    return []


def print_table(kills: Sequence[Kill]) -> None:
    """One line for each kill, and the sums."""
    print(f"{'kill':>4}  {'what':<13}  {'when':<28}  {'steps redone':>12}  {'seconds lost':>12}")
    for number, kill in enumerate(kills, start=1):
        lost = "-" if kill.seconds_lost is None else f"{kill.seconds_lost:.1f}"
        when = f"step {kill.step}, {kill.moment}"
        print(f"{number:>4}  {kill.victim:<13}  {when:<28}  {kill.steps_redone:>12}  {lost:>12}")
    num_in_save = sum(kill.in_save for kill in kills)
    say(f"{len(kills)} kills, {num_in_save} inside a save; {sum(kill.steps_redone for kill in kills)} steps redone")


def count_ranks(number: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} rank{'s' if number > 1 else ''}"


def say(message: str) -> None:
    """Prints one line about progress."""
    print(f"launch.chaos: {message}", flush=True)


def _be_silent(message: str) -> None:
    """For the events of single attempts."""


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    sys.exit(main())
