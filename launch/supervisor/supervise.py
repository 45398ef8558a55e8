"""Starts a run again after failures, until it is finished, stopped, or has failed too often."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from configs.resume import restart_arguments
from configs.schema import Config
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE
from launch.run_folder.checkpoints import newest_checkpoint
from launch.run_folder.folder import RunFolder
from launch.run_folder.observe import done_step
from launch.supervisor.attempt import Attempt, Launch, Report
from launch.supervisor.requests import Requests, say, write_line

FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0
INTERRUPTED = "interrupted; the run can go on from its last checkpoint"


class Started(Protocol):
    """An attempt, on one node or on several."""

    def wait(self, requests: Requests) -> None:
        """Returns when it is over and none of its processes is left."""

    def kill(self) -> None:
        """Kills whatever still runs."""

    def close(self) -> Report:
        """What came of it."""


class Crew(Protocol):
    """The node, or the nodes, on which a run is started."""

    def start(self, launch: Launch) -> Started:
        """Starts an attempt. Raises RunError or OSError when that is impossible."""

    def look(self) -> object:
        """Takes note of what happens while no attempt runs."""

    def reassemble(self) -> None:
        """Before a restart: looks for nodes that were lost. Raises RunError when none is left."""


class ThisNode:
    """A run on this node alone."""

    def start(self, launch: Launch) -> Attempt:
        """See `Crew`."""
        return Attempt(launch, say)

    def look(self) -> None:
        """There is nobody to look after."""

    def reassemble(self) -> None:
        """There is nobody else."""


def supervise(crew: Crew, launch: Launch, config: Config, max_restarts: int, requests: Requests) -> int:
    """Runs to the end, and says why it ended. Returns the exit code."""
    folder = RunFolder.of(config)
    last_step = config.train.last_step
    begin = time.time()
    backoff_seconds = FIRST_BACKOFF_SECONDS
    num_restarts = 0
    while True:
        known = newest_checkpoint(folder.checkpoints)
        exit_code, reason = run_once(crew, launch, folder, last_step, requests)
        if exit_code == EXIT_DONE:
            say(f"finished: {folder.path}")
            return EXIT_DONE
        if exit_code == EXIT_STOPPED:
            _, newest = newest_checkpoint(folder.checkpoints)
            say(f"stopped on request; the same command continues from {newest or 'the start'}")
            return EXIT_STOPPED
        if num_restarts == max_restarts or requests or exit_code == EXIT_USAGE:
            write_line(2, f"error: {reason}")
            return exit_code
        num_restarts += 1
        if newest_checkpoint(folder.checkpoints) != known:
            backoff_seconds = FIRST_BACKOFF_SECONDS
        say(f"failed: {reason}; restart {num_restarts} of {max_restarts} in {backoff_seconds:.0f} s")
        if not requests.wait(backoff_seconds, crew.look):
            crew.reassemble()
        if requests:
            say("stopped on request")
            return EXIT_STOPPED
        backoff_seconds = min(2 * backoff_seconds, LONGEST_BACKOFF_SECONDS)
        launch = restarted(launch, folder, begin)


def run_once(crew: Crew, launch: Launch, folder: RunFolder, last_step: int, requests: Requests) -> tuple[int, str]:
    """One attempt: its exit code, and in one line why it failed."""
    report = carry_out(crew, launch, requests)
    if EXIT_DONE in report.codes and (done_step(folder.path) or 0) >= last_step:
        return EXIT_DONE, ""
    # A rank that reports 75 knows of the commit; others may have lost contact when it left.
    if EXIT_STOPPED in report.codes and (requests or not report.lost_launcher):
        return EXIT_STOPPED, ""
    if requests.shall_kill:
        return EXIT_FAILURE, INTERRUPTED
    if requests and not report.ranks:
        return EXIT_STOPPED, ""
    return EXIT_USAGE if EXIT_USAGE in report.codes else EXIT_FAILURE, report.failure()


def preflight(crew: Crew, launch: Launch, num_ranks: int, requests: Requests) -> int:
    """Runs `launch.preflight`, which prints what it finds. Returns the exit code.

    Args:
        launch: of the preflight.
        num_ranks: on all nodes together, each of which must find nothing wrong.
    """
    report = carry_out(crew, launch, requests)
    if len(report.outcomes) == num_ranks and report.codes == {EXIT_DONE}:
        return EXIT_DONE
    if requests.shall_kill:
        write_line(2, f"error: {INTERRUPTED}")
        return EXIT_FAILURE
    if requests:
        say("stopped on request")
        return EXIT_STOPPED
    if report.fault or not report.outcomes:
        write_line(2, f"error: the preflight came to no result: {report.failure()}")
    return EXIT_FAILURE


def carry_out(crew: Crew, launch: Launch, requests: Requests) -> Report:
    """An attempt from its start to its report; nothing of it is left, whatever happens here."""
    attempt = crew.start(launch)
    try:
        attempt.wait(requests)
    finally:
        attempt.kill()
        report = attempt.close()
    return report


def restarted(launch: Launch, folder: RunFolder, begin: float) -> Launch:
    """The launch of a restart, which resumes from a checkpoint that was saved since `begin`, if there is one."""
    _, newest = newest_checkpoint(folder.checkpoints)
    has_saved = newest is not None and newest.stat().st_mtime >= begin
    return replace(launch, arguments=restart_arguments(launch.arguments, has_saved))
