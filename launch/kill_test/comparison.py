"""The whole test: an uninterrupted run, then the same run with kills, and a table of the kills."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from configs.errors import ConfigError
from configs.schema import Config
from launch.errors import EXIT_DONE, EXIT_FAILURE
from launch.kill_test.killed_run import Kill, KilledRun, run_uninterrupted
from launch.kill_test.losses import losses
from launch.kill_test.plans import make_plans
from launch.run_folder.observe import read_records
from launch.supervisor.attempt import Launch

HEADER = ("kill", "what", "when", "steps redone", "seconds lost")
TOLERANCE = 1e-5  # relative, between different numbers of ranks in fp32
UNINTERRUPTED, KILLED, OUTPUT = "uninterrupted", "killed", "output.log"  # in RUN-chaos/


def launcher_for(launcher: str, num_ranks: int) -> str:
    """Returns the launcher; a single rank needs none and starts faster without."""
    return "python" if num_ranks == 1 else launcher


def make_folder(config: Config) -> Path:
    """Creates an empty RUN-chaos/; deletes what an earlier call has left there.

    Raises:
        ConfigError: It contains something else.
    """
    parent = Path(config.run.dir) / f"{config.run.name}-chaos"
    strays = sorted(path.name for path in parent.glob("*") if path.name not in (UNINTERRUPTED, KILLED, OUTPUT))
    if strays:
        raise ConfigError([f"{parent}: contains {strays[0]}, which is not from this command; move it away"])
    if parent.exists():
        shutil.rmtree(parent)
    parent.mkdir(parents=True)
    return parent


def run(options: argparse.Namespace, config: Config, parent: Path, ranks: list[int], output: IO[bytes]) -> int:
    """Runs the uninterrupted run, then the killed one, and prints the table. Returns the exit code."""

    def launch(name: str, num_ranks: int) -> Launch:
        settings = (f"run.dir={json.dumps(str(parent))}", f"run.name={name}", "run.resume=auto")
        launcher = launcher_for(options.launcher, num_ranks)
        return Launch(launcher, num_ranks, (options.config, *options.overrides, *settings))

    last_step = config.train.last_step
    whole = parent / UNINTERRUPTED
    log_event(
        f"training {last_step} steps without kills, with {count_ranks(ranks[0])}; the runs' output is in {output.name}"
    )
    pace = run_uninterrupted(launch(UNINTERRUPTED, ranks[0]), whole, last_step, output)
    log_event(f"{pace.start:.1f} s to the first step, {pace.step:.3f} s per step, {pace.save:.3f} s per save")
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
            log_event(f"kill {number + 1} of {options.kills}: {what}, at step {kill.step}, {kill.moment}")
    else:
        killed.check_end(whole)
    print_table(killed.kills)
    for fault in killed.faults:
        print(f"error: {fault}", file=sys.stderr)
    if killed.faults:
        return EXIT_FAILURE
    how = "bit-identical to" if tolerance == 0 else f"within {tolerance:g} of"
    log_event(f"all {last_step} steps have losses {how} the uninterrupted run's")
    return EXIT_DONE


def print_table(kills: Sequence[Kill]) -> None:
    """Prints one row per kill, and the totals."""
    from tabulate import tabulate  # here, since importing it would slow down --help

    rows = [HEADER]
    for number, kill in enumerate(kills, start=1):
        lost = "-" if kill.seconds_lost is None else f"{kill.seconds_lost:.1f}"
        when = f"step {kill.step}, {kill.moment}"
        rows.append((str(number), kill.victim, when, str(kill.steps_redone), lost))
    align = ("right", "left", "left", "right", "right")
    print(tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align))
    num_in_save = sum(kill.in_save for kill in kills)
    log_event(
        f"{len(kills)} kills, {num_in_save} inside a save; {sum(kill.steps_redone for kill in kills)} steps redone"
    )


def count_ranks(number: int) -> str:
    """Returns `1 rank`, `2 ranks`, ..."""
    return f"{number} rank{'s' if number > 1 else ''}"


def log_event(message: str) -> None:
    """Prints one line about progress."""
    print(f"launch.chaos: {message}", flush=True)
