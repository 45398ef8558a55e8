"""Supervises a run on this node: starts the launcher, forwards signals to every rank, restarts after a failure.

Exit codes: 0 the run is finished, 75 stopped on request after a checkpoint, 1 failed, 2 wrong usage. They come from
what the ranks report and from the run's DONE marker, not from the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import Config
from launch.attempt import LAUNCHERS, Attempt, Launch, count_gpus
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE, RunError
from launch.observe import done_step, newest_checkpoint
from launch.stop import SIGNALS

FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0


class Requests(list[int]):
    """Signals that this process got, in order; each is for every rank."""

    def listen(self) -> None:
        """Collects signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.append(number)
        more = "; killing all ranks" if self.count(signal.SIGINT) > 1 else "; forwarding it to every rank"
        say(f"got {signal.Signals(number).name}{more}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, supervises, and returns the exit code."""
    options = parse_arguments(arguments)
    try:
        config = load_config(options.config, options.overrides)
        num_ranks = choose_num_ranks(options.launcher, options.num_ranks)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USAGE
    launch = Launch(options.launcher, num_ranks, (options.config, *options.overrides))
    requests = Requests()
    requests.listen()
    try:
        return supervise(launch, config, options.max_restarts, requests)
    except (RunError, OSError) as error:
        _write(2, f"error: {error}")
        return EXIT_FAILURE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.run", description=(__doc__ or "").split("\n\n")[0])
    add_run_arguments(parser)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="deepspeed", help="default: deepspeed")
    parser.add_argument(
        "--num-ranks", type=positive_integer, metavar="N", help="processes on this node; default: its GPUs, 1 on CPU"
    )
    parser.add_argument(
        "--max-restarts",
        type=non_negative_integer,
        default=0,
        metavar="R",
        help="start again from the last checkpoint after at most R failures; default: 0",
    )
    return parser.parse_intermixed_args(arguments)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What names a run: its configuration and the changed keys."""
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a key, e.g. optim.lr=1e-3")


def positive_integer(text: str) -> int:
    """For argparse."""
    return _integer(text, smallest=1)


def non_negative_integer(text: str) -> int:
    """For argparse."""
    return _integer(text, smallest=0)


def _integer(text: str, smallest: int) -> int:
    if not text.isdecimal() or int(text) < smallest:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {smallest} on")
    return int(text)


def choose_num_ranks(launcher: str, wanted: int | None) -> int:
    """The number of ranks: as asked for, else one for each GPU, or one on CPU.

    Raises:
        ConfigError: more than there are GPUs, or more than one with `python`.
    """
    if launcher == "python":
        if wanted not in (None, 1):
            raise ConfigError([f"--num-ranks {wanted}: --launcher python starts one rank; use deepspeed or torchrun"])
        return 1
    num_gpus = count_gpus()
    if wanted and num_gpus and wanted > num_gpus:
        raise ConfigError([f"--num-ranks {wanted}: this node shows {num_gpus} GPUs, and every rank needs its own"])
    return wanted or max(1, num_gpus)


def supervise(launch: Launch, config: Config, max_restarts: int, requests: Requests) -> int:
    """Starts the run again after failures until it is finished, stopped or failed too often. Returns the exit code."""
    assert config.run.name is not None
    folder = Path(config.run.dir) / config.run.name
    last_step = config.train.stop_step or config.train.steps
    begin = time.time()
    backoff_seconds = FIRST_BACKOFF_SECONDS
    num_restarts = 0
    while True:
        known = newest_checkpoint(folder)
        exit_code, reason = run_once(launch, folder, last_step, requests)
        if exit_code == EXIT_DONE:
            say(f"finished: {folder}")
            return EXIT_DONE
        if exit_code == EXIT_STOPPED:
            say(f"stopped on request; the same command goes on from {newest_checkpoint(folder)[1] or 'the start'}")
            return EXIT_STOPPED
        if num_restarts == max_restarts or requests or exit_code == EXIT_USAGE:
            _write(2, f"error: {reason}")
            return exit_code
        num_restarts += 1
        if newest_checkpoint(folder) != known:
            backoff_seconds = FIRST_BACKOFF_SECONDS
        say(f"failed: {reason}; restart {num_restarts} of {max_restarts} in {backoff_seconds:.0f} s")
        if wait_for_request(backoff_seconds, requests):
            say("stopped on request")
            return EXIT_STOPPED
        backoff_seconds = min(2 * backoff_seconds, LONGEST_BACKOFF_SECONDS)
        launch = going_on(launch, folder, begin)


def run_once(launch: Launch, folder: Path, last_step: int, requests: Requests) -> tuple[int, str]:
    """One attempt: its exit code, and in one line why it failed."""
    attempt = Attempt(launch, say)
    try:
        attempt.wait(requests)
    finally:
        attempt.kill()
        outcomes = attempt.close()
    codes = {outcome.code for outcome in outcomes.values()}
    if EXIT_DONE in codes and (done_step(folder) or 0) >= last_step:
        return EXIT_DONE, ""
    # A rank that reports 75 knows of the commit; others may have lost contact when it left.
    if EXIT_STOPPED in codes and (requests or not attempt.lost_launcher(outcomes)):
        return EXIT_STOPPED, ""
    if requests.count(signal.SIGINT) > 1:
        return EXIT_FAILURE, "interrupted; the run can go on from its last checkpoint"
    if requests and not attempt.ranks:
        return EXIT_STOPPED, ""
    return EXIT_USAGE if EXIT_USAGE in codes else EXIT_FAILURE, attempt.failure(outcomes)


def going_on(launch: Launch, folder: Path, begin: float) -> Launch:
    """The same launch, which goes on from what was saved since `begin`, whatever `run.resume` says of the first start.

    Until something was saved, a restart does what the first start did.
    """
    _, newest = newest_checkpoint(folder)
    if newest is None or newest.stat().st_mtime < begin or "run.resume=auto" in launch.arguments:
        return launch
    return Launch(launch.launcher, launch.num_ranks, (*launch.arguments, "run.resume=auto"))


def wait_for_request(seconds: float, requests: Requests) -> bool:
    """Waits; whether a request came."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not requests:
        time.sleep(0.05)
    return bool(requests)


def say(message: str) -> None:
    """Prints one line about an event."""
    _write(1, f"launch.run: {message}")


def _write(descriptor: int, line: str) -> None:
    """Not by print(): this is also called where a signal interrupted one, and nobody may be reading any more."""
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
