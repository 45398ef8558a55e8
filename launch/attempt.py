"""One start of a launcher and its ranks, seen from outside: signalling, noticing the end, leaving nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from launch.errors import EXIT_DONE, EXIT_STOPPED, RunError
from launch.lifeline import RANKS_FOLDER, SUPERVISOR, RankOutcome, is_alive, read_announcements, read_outcomes
from launch.stop import LOST_SECONDS
from launch.topology import free_port, threads_per_rank

LAUNCHERS = ("deepspeed", "torchrun", "python")
POLL_SECONDS = 0.1
TEARDOWN_SECONDS = 10.0  # for the other ranks and the launcher, once a rank has failed or all have ended
KILL_SECONDS = 20.0
_SCRIPT = Path(__file__).parents[1] / "train.py"


@dataclass(frozen=True)
class Launch:
    """What to start on this node.

    Attributes:
        launcher: one of `LAUNCHERS`.
        num_ranks: processes; `python` starts only one.
        arguments: of train.py.
    """

    launcher: str
    num_ranks: int
    arguments: tuple[str, ...]

    def command(self) -> list[str]:
        """The command line, with a port of its own for every call. Raises RunError when the launcher is missing."""
        script = [str(_SCRIPT), *self.arguments]
        port = str(free_port())
        if self.launcher == "python":
            return [sys.executable, *script]
        program = _find_program(self.launcher)
        if self.launcher == "torchrun":
            return [program, "--nproc_per_node", str(self.num_ranks), "--master_port", port, *script]
        options = ["--log_level", "error", "--hostfile", os.devnull, "--master_port", port]
        if count_gpus() > 0 and (devices := visible_devices()):
            # Given a number, the launcher would ignore CUDA_VISIBLE_DEVICES.
            options += ["--include", "localhost:" + ",".join(devices[: self.num_ranks])]
        else:
            options += ["--num_gpus", str(self.num_ranks)]
        return [program, *options, *script]


class Attempt:
    """A launcher in a session of its own, and the ranks that announce themselves.

    Args:
        launch: what to start.
        say: is called with one line for each event.
        output: where the processes print; None: where this one does.
    """

    def __init__(self, launch: Launch, say: Callable[[str], None], output: IO[bytes] | None = None) -> None:
        command = launch.command()
        self._launch = launch
        self._say = say
        self._folder = Path(tempfile.mkdtemp(prefix="steadyhead-ranks-"))
        self._signals_sent: dict[int, int] = {}
        self.ranks: dict[int, psutil.Process] = {}
        self._lost_launcher = False
        self._launcher = subprocess.Popen(
            command,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        plural = "s" if launch.num_ranks > 1 else ""
        say(f"started {launch.launcher} (process {self._launcher.pid}) for {launch.num_ranks} rank{plural}")

    def wait(self, requests: Sequence[int] = ()) -> None:
        """Returns when the attempt is over and none of its processes is left.

        Args:
            requests: signals for every rank; a handler may append to it meanwhile. With a second SIGINT in it, or
                when there is no rank yet, everything is killed at once.
        """
        deadline: float | None = None
        while not self._is_over(requests):
            now = time.monotonic()
            if deadline is None and (seconds := self._seconds_to_end()) is not None:
                deadline = now + seconds
            if deadline is not None and now > deadline:
                break
            time.sleep(POLL_SECONDS)
        self.kill()

    def look(self) -> bool:
        """Takes note of ranks that have started; whether the launcher or a rank still runs."""
        for rank, pid in read_announcements(self._folder).items():
            if rank not in self.ranks:
                try:
                    self.ranks[rank] = psutil.Process(pid)
                except psutil.NoSuchProcess:
                    continue
        return self._launcher.poll() is None or bool(self._living())

    def processes(self) -> list[psutil.Process]:
        """Everything that was started in this attempt and still runs, wherever it is in the tree of processes."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(RANKS_FOLDER) == str(self._folder) and is_alive(process):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def kill(self) -> None:
        """Kills whatever of this attempt still runs (a stopped process too), and waits until it is gone."""
        end = time.monotonic() + KILL_SECONDS
        self._launcher.kill()
        while (left := self.processes()) and time.monotonic() < end:
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(left, timeout=1)
        if left:
            self._say(f"process {', '.join(str(process.pid) for process in left)} cannot be killed")
        else:
            self._launcher.wait()

    def outcomes(self) -> dict[int, RankOutcome]:
        """What the ranks reported before they ended."""
        return read_outcomes(self._folder)

    def close(self) -> dict[int, RankOutcome]:
        """Removes the folder of announcements and returns the outcomes that were in it."""
        outcomes = self.outcomes()
        shutil.rmtree(self._folder, ignore_errors=True)
        return outcomes

    def lost_launcher(self, outcomes: dict[int, RankOutcome]) -> bool:
        """Whether the launcher ended before the ranks, as far as this process or a rank noticed."""
        return self._lost_launcher or any(outcome.is_orphan for outcome in outcomes.values())

    def failure(self, outcomes: dict[int, RankOutcome]) -> str:
        """In one line, why an attempt failed: a rank's own words, else who ended without a word."""
        reasons = [(rank, outcome.reason) for rank, outcome in sorted(outcomes.items()) if outcome.reason]
        first_hand = [(rank, reason) for rank, reason in reasons if "lost contact" not in reason]
        silent = sorted(rank for rank in self.ranks if rank not in outcomes)
        if first_hand:
            rank, reason = first_hand[0]
            return reason if reason.startswith("rank ") else f"rank {rank}: {reason}"
        if self.lost_launcher(outcomes):
            return f"{self._launch.launcher} ended while ranks were running"
        if silent:
            return f"rank {', '.join(map(str, silent))} was killed or crashed"
        if reasons:
            return reasons[0][1]
        if not self.ranks:
            return f"{self._launch.launcher} ended with code {self._launcher.poll()} before it had started a rank"
        return "the ranks ended without the completion marker"

    def _environment(self) -> dict[str, str]:
        # The same for every launcher; torchrun would take 1.
        environment = {"OMP_NUM_THREADS": str(threads_per_rank({}, self._launch.num_ranks)), **os.environ}
        if count_gpus() == 0:
            environment.setdefault("DS_ACCELERATOR", "cpu")
        return {**environment, SUPERVISOR: str(os.getpid()), RANKS_FOLDER: str(self._folder)}

    def _is_over(self, requests: Sequence[int]) -> bool:
        """Whether nothing runs any more, or all shall end at once; also forwards requests to the ranks."""
        runs = self.look()
        for rank, process in self.ranks.items():
            for number in requests[self._signals_sent.get(rank, 0) :]:
                if is_alive(process):
                    process.send_signal(number)
                self._signals_sent[rank] = self._signals_sent.get(rank, 0) + 1
        has_none = bool(requests) and not self.ranks
        return not runs or has_none or list(requests).count(signal.SIGINT) > 1

    def _seconds_to_end(self) -> float | None:
        """How long to wait for the rest of an attempt that is coming to its end; None while it is not."""
        launcher_has_ended = self._launcher.poll() is not None  # before looking at the ranks, which end first
        living = self._living()
        if launcher_has_ended and living:
            self._lost_launcher = True
            plural = "s are" if len(living) > 1 else " is"
            self._say(f"{self._launch.launcher} has ended and {len(living)} rank{plural} running; stopping")
            return LOST_SECONDS + TEARDOWN_SECONDS
        outcomes = self.outcomes()
        ended = [rank for rank in self.ranks if rank not in living]
        good = (EXIT_DONE, EXIT_STOPPED)
        if any(rank not in outcomes or outcomes[rank].code not in good for rank in ended):
            return TEARDOWN_SECONDS
        return TEARDOWN_SECONDS if len(ended) == self._launch.num_ranks else None

    def _living(self) -> list[int]:
        return [rank for rank, process in self.ranks.items() if is_alive(process)]


def visible_devices() -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES; none where it is not set."""
    return [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use, without importing torch."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(visible_devices())
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def _find_program(name: str) -> str:
    """Next to this interpreter, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RunError(f"--launcher {name}: no such program beside {sys.executable} or on the PATH")
    return found
