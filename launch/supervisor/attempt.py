"""One start of a launcher and its ranks, seen from outside: signalling, noticing the end, leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from launch import PROJECT_ROOT
from launch.distributed.topology import free_port, threads_per_rank
from launch.errors import EXIT_DONE, EXIT_STOPPED, RunError
from launch.process.lifeline import RANKS_FOLDER, SUPERVISOR, RankOutcome, is_alive, read_announcements, read_outcomes
from launch.process.stop import LOST_SECONDS

LAUNCHERS = ("deepspeed", "torchrun", "python")
SPAWN = "spawn"  # see `launch.supervisor.spawn`; not for train.py
POLL_SECONDS = 0.1
TEARDOWN_SECONDS = 10.0  # for the other ranks and the launcher, once a rank has failed or all have ended
KILL_SECONDS = 20.0
_SCRIPT = PROJECT_ROOT / "train.py"


@dataclass(frozen=True)
class Place:
    """Where a node stands among the nodes of one start.

    Attributes:
        node: its number, from 0.
        num_nodes: all of them, each with the same number of ranks.
        master_addr, master_port: where rank 0 listens.
    """

    node: int
    num_nodes: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class Launch:
    """What to start on this node.

    Attributes:
        launcher: one of `LAUNCHERS`, or `SPAWN`.
        num_ranks: processes on this node; `python` starts only one.
        arguments: of train.py, or of the module.
        module: to run instead of train.py.
        place: among several nodes; None: this node is the only one, and rank 0 gets a port of its own.
    """

    launcher: str
    num_ranks: int
    arguments: tuple[str, ...]
    module: str | None = None
    place: Place | None = None

    def command(self, folder: Path) -> list[str]:
        """The command line.

        Args:
            folder: for files that the launcher reads.

        Raises:
            RunError: the launcher is missing.
        """
        script = [str(_SCRIPT)] if self.module is None else ["-m", self.module]
        if self.launcher == "python":
            return [sys.executable, *script, *self.arguments]
        place = self.place or Place(0, 1, "127.0.0.1", free_port())
        if self.launcher == SPAWN:
            options = [str(self.num_ranks), str(place.node), str(place.num_nodes)]
            options += [place.master_addr, str(place.master_port)]
            return [sys.executable, "-m", "launch.supervisor.spawn", *options, *script, *self.arguments]
        program = _find_program(self.launcher)
        options = ["--master_addr", place.master_addr, "--master_port", str(place.master_port)]
        if self.launcher == "torchrun":
            nodes = ["--nnodes", str(place.num_nodes), "--node_rank", str(place.node)]
            return [program, *nodes, "--nproc_per_node", str(self.num_ranks), *options, *script, *self.arguments]
        options += ["--log_level", "error", *self._deepspeed_ranks(folder)]
        return [program, *options, *(["--module"] if self.module else []), self.module or script[0], *self.arguments]

    def to_json(self) -> dict[str, Any]:
        """For `from_json` on another node."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Launch:
        """From what `to_json` returned."""
        place = None if tree["place"] is None else Place(**tree["place"])
        return cls(**{**tree, "arguments": tuple(tree["arguments"]), "place": place})

    def _deepspeed_ranks(self, folder: Path) -> list[str]:
        devices = visible_devices() if count_gpus() > 0 else []  # else the launcher would ignore CUDA_VISIBLE_DEVICES
        if self.place is None:
            ranks = ["--include", "localhost:" + ",".join(devices[: self.num_ranks])] if devices else []
            return ["--hostfile", os.devnull, *(ranks or ["--num_gpus", str(self.num_ranks)])]
        # The names stand for themselves: nobody is looked for under them.
        names = [f"node-{number}" for number in range(self.place.num_nodes)]
        slots = dict.fromkeys(names, self.num_ranks)
        options = ["--no_ssh", "--node_rank", str(self.place.node)]
        devices = devices[: self.num_ranks]
        if devices and all(device.isdecimal() for device in devices):
            own = names[self.place.node]
            slots[own] = max(map(int, devices)) + 1
            chosen = [f"{name}:{','.join(devices)}" if name == own else name for name in names]
            options += ["--include", "@".join(chosen)]
        hostfile = folder / "hostfile"
        hostfile.write_text("".join(f"{name} slots={number}\n" for name, number in slots.items()))
        return ["--hostfile", str(hostfile), *options]


@dataclass(frozen=True)
class Report:
    """How an attempt ended, on one node or on all.

    Attributes:
        launcher: its name.
        ranks: that have announced themselves.
        outcomes: what ranks have reported.
        lost_launcher: whether the launcher ended before the ranks, as far as anybody noticed.
        launcher_code: the launcher's exit code; None where it had to be killed.
        fault: why the attempt failed, where it is not the ranks who know.
    """

    launcher: str
    ranks: tuple[int, ...]
    outcomes: dict[int, RankOutcome]
    lost_launcher: bool = False
    launcher_code: int | None = None
    fault: str = ""

    @classmethod
    def merge(cls, reports: Iterable[Report], fault: str = "") -> Report:
        """One report of all nodes; `fault` says which nodes were lost."""
        reports = list(reports)
        faults = [report.fault for report in reports if report.fault]
        codes = [report.launcher_code for report in reports if report.launcher_code != 0]
        return cls(
            launcher=reports[0].launcher if reports else "",
            ranks=tuple(sorted(rank for report in reports for rank in report.ranks)),
            outcomes={rank: outcome for report in reports for rank, outcome in report.outcomes.items()},
            lost_launcher=bool(fault) or any(report.lost_launcher for report in reports),
            launcher_code=codes[0] if codes else 0,
            fault=fault or (faults[0] if faults else ""),
        )

    def to_json(self) -> dict[str, Any]:
        """For `from_json` on another node."""
        return {**asdict(self), "outcomes": {str(rank): asdict(one) for rank, one in self.outcomes.items()}}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Report:
        """From what `to_json` returned, after it was sent as JSON."""
        outcomes = {int(rank): RankOutcome(**outcome) for rank, outcome in tree["outcomes"].items()}
        return cls(**{**tree, "ranks": tuple(tree["ranks"]), "outcomes": outcomes})

    @property
    def codes(self) -> set[int]:
        """The exit codes that ranks have reported."""
        return {outcome.code for outcome in self.outcomes.values()}

    def failure(self) -> str:
        """In one line, why an attempt failed: a rank's own words, else who ended without a word."""
        reasons = [(rank, outcome.reason) for rank, outcome in sorted(self.outcomes.items()) if outcome.reason]
        first_hand = [(rank, reason) for rank, reason in reasons if "lost contact" not in reason]
        silent = sorted(rank for rank in self.ranks if rank not in self.outcomes)
        if self.fault:
            return self.fault
        if first_hand:
            rank, reason = first_hand[0]
            return reason if reason.startswith("rank ") else f"rank {rank}: {reason}"
        if self.lost_launcher:
            return f"{self.launcher} ended while ranks were running"
        if silent:
            return f"rank {', '.join(map(str, silent))} was killed or crashed"
        if reasons:
            return reasons[0][1]
        if not self.ranks:
            return f"{self.launcher} ended with code {self.launcher_code} before it had started a rank"
        return "the ranks ended without the completion marker"


class Attempt:
    """A launcher in a session of its own, and the ranks that announce themselves.

    Args:
        launch: what to start.
        say: is called with one line for each event.
        output: where the processes print; None: where this one does.
    """

    def __init__(self, launch: Launch, say: Callable[[str], None], output: IO[bytes] | None = None) -> None:
        self._launch = launch
        self._say = say
        self._folder = Path(tempfile.mkdtemp(prefix="steadyhead-ranks-"))
        self._signals_sent: dict[int, int] = {}
        self.ranks: dict[int, psutil.Process] = {}
        self._lost_launcher = False
        self._launcher_code: int | None = None
        self._is_killed = False
        try:
            self._launcher = subprocess.Popen(
                launch.command(self._folder),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except (RunError, OSError):
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        plural = "s" if launch.num_ranks > 1 else ""
        say(f"started {launch.launcher} (process {self._launcher.pid}) for {launch.num_ranks} rank{plural}")

    def wait(self, requests: Sequence[int] = (), is_given_up: Callable[[], bool] = lambda: False) -> None:
        """Returns when the attempt is over and none of its processes is left.

        Args:
            requests: signals for every rank; a handler may append to it meanwhile. With a second SIGINT in it, or
                when there is no rank yet, everything is killed at once.
            is_given_up: is asked all the time; when it says so, everything is killed at once.
        """
        deadline: float | None = None
        while not is_given_up() and not self._is_over(requests):
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
        if not self._is_killed:  # afterwards it ended by this
            self._launcher_code, self._is_killed = self._launcher.poll(), True
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

    def close(self) -> Report:
        """Removes the folder of announcements; returns what was in it."""
        outcomes = self.outcomes()
        shutil.rmtree(self._folder, ignore_errors=True)
        lost_launcher = self._lost_launcher or any(outcome.is_orphan for outcome in outcomes.values())
        code = self._launcher_code
        return Report(self._launch.launcher, tuple(sorted(self.ranks)), outcomes, lost_launcher, code)

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
                with contextlib.suppress(psutil.NoSuchProcess):
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
