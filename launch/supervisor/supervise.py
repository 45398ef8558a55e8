"""Restarts a run after failures until it is finished, stopped, or out of restarts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from configs.resume import restart_arguments
from configs.schema import Config
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE, INTERRUPTED
from launch.run_folder.checkpoints import newest_checkpoint
from launch.run_folder.folder import RunFolder
from launch.run_folder.observe import done_step
from launch.supervisor.attempt import Attempt, Launch, Report
from launch.supervisor.requests import Requests, log_event, write_line

FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0


class RunningAttempt(Protocol):
    """An attempt on one node or on several."""

    def wait(self, requests: Requests) -> None:
        """Waits until it is over and none of its processes is left."""

    def kill(self) -> None:
        """Kills whatever still runs."""

    def close(self) -> Report:
        """Returns the report of the attempt."""


class Nodes(Protocol):
    """The node or nodes of a run: `ThisNode` or a `Coordinator`."""

    def start(self, launch: Launch) -> RunningAttempt:
        """Starts an attempt. Raises RunError or OSError when that is impossible."""

    def poll(self) -> object:
        """Handles messages while no attempt runs."""

    def recover_lost_nodes(self) -> None:
        """Tries to reconnect to lost nodes, before a restart. Raises RunError when no node is left."""


class ThisNode:
    """A run on this node alone."""

    def start(self, launch: Launch) -> Attempt:
        """See `Nodes`."""
        return Attempt(launch, log_event)

    def poll(self) -> None:
        """Does nothing: there are no messages."""

    def recover_lost_nodes(self) -> None:
        """Does nothing: there are no other nodes."""


def supervise(nodes: Nodes, launch: Launch, config: Config, max_restarts: int, requests: Requests) -> int:
    """Runs to the end, with restarts, and logs why it ended. Returns the exit code."""
    folder = RunFolder.of(config)
    last_step = config.train.last_step
    begin = time.time()
    backoff_seconds = FIRST_BACKOFF_SECONDS
    num_restarts = 0
    while True:
        previous = newest_checkpoint(folder.checkpoints)
        exit_code, reason = run_once(nodes, launch, folder, last_step, requests)
        if exit_code == EXIT_DONE:
            log_event(f"finished: {folder.path}")
            return EXIT_DONE
        if exit_code == EXIT_STOPPED:
            _, newest = newest_checkpoint(folder.checkpoints)
            log_event(f"stopped on request; the same command continues from {newest or 'the start'}")
            return EXIT_STOPPED
        if num_restarts == max_restarts or requests or exit_code == EXIT_USAGE:
            write_line(2, f"error: {reason}")
            return exit_code
        num_restarts += 1
        if newest_checkpoint(folder.checkpoints) != previous:
            backoff_seconds = FIRST_BACKOFF_SECONDS
        log_event(f"failed: {reason}; restart {num_restarts} of {max_restarts} in {backoff_seconds:.0f} s")
        if not requests.wait(backoff_seconds, nodes.poll):
            nodes.recover_lost_nodes()
        if requests:
            log_event("stopped on request")
            return EXIT_STOPPED
        backoff_seconds = min(2 * backoff_seconds, MAX_BACKOFF_SECONDS)
        launch = launch_for_restart(launch, folder, begin)


def run_once(nodes: Nodes, launch: Launch, folder: RunFolder, last_step: int, requests: Requests) -> tuple[int, str]:
    """Runs one attempt. Returns its exit code, and in one line why it failed."""
    report = run_attempt(nodes, launch, requests)
    if EXIT_DONE in report.codes and (done_step(folder.path) or 0) >= last_step:
        return EXIT_DONE, ""
    # A rank that reports 75 has seen the commit; others may have lost contact when it left.
    if EXIT_STOPPED in report.codes and (requests or not report.lost_launcher):
        return EXIT_STOPPED, ""
    if requests.must_kill:
        return EXIT_FAILURE, INTERRUPTED
    if requests and not report.ranks:
        return EXIT_STOPPED, ""
    return EXIT_USAGE if EXIT_USAGE in report.codes else EXIT_FAILURE, report.failure()


def preflight(nodes: Nodes, launch: Launch, num_ranks: int, requests: Requests) -> int:
    """Runs `launch.preflight`, which prints what it finds. Returns the exit code.

    Args:
        launch: How to start the preflight.
        num_ranks: Ranks on all nodes together, all of which must end with code 0.
    """
    report = run_attempt(nodes, launch, requests)
    if len(report.outcomes) == num_ranks and report.codes == {EXIT_DONE}:
        return EXIT_DONE
    if requests.must_kill:
        write_line(2, f"error: {INTERRUPTED}")
        return EXIT_FAILURE
    if requests:
        log_event("stopped on request")
        return EXIT_STOPPED
    if report.fault or not report.outcomes:
        write_line(2, f"error: the preflight ended without a result: {report.failure()}")
    return EXIT_FAILURE


def run_attempt(nodes: Nodes, launch: Launch, requests: Requests) -> Report:
    """Runs an attempt and returns its report; no process is left, even when an exception is raised."""
    attempt = nodes.start(launch)
    try:
        attempt.wait(requests)
    finally:
        attempt.kill()
        report = attempt.close()
    return report


def launch_for_restart(launch: Launch, folder: RunFolder, begin: float) -> Launch:
    """Returns the launch of a restart, which resumes from a checkpoint saved since `begin` if there is one."""
    _, newest = newest_checkpoint(folder.checkpoints)
    has_saved = newest is not None and newest.stat().st_mtime >= begin
    return replace(launch, arguments=restart_arguments(launch.arguments, has_saved))
