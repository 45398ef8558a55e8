"""One start of a launcher and its ranks: forwards signals, detects the end, and leaves no process behind."""

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
from launch.process.rank_status import (
    RANKS_FOLDER,
    SUPERVISOR,
    RankOutcome,
    is_alive,
    read_outcomes,
    read_registered_ranks,
)
from launch.process.stop import ORPHAN_GRACE_SECONDS

LAUNCHERS = ("deepspeed", "torchrun", "python")
SPAWN = "spawn"  # `launch.supervisor.spawn`, for the preflight only
POLL_SECONDS = 0.1
TEARDOWN_SECONDS = 10.0  # for the other ranks and the launcher, once a rank has failed or all have ended
KILL_SECONDS = 20.0
_SCRIPT = PROJECT_ROOT / "train.py"


@dataclass(frozen=True)
class Place:
    """The place of a node among the nodes of one attempt.

    Attributes:
        node: The node's number, from 0.
        num_nodes: The number of nodes, each with the same number of ranks.
        master_addr, master_port: Where rank 0 listens.
    """

    node: int
    num_nodes: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class Launch:
    """What to start on this node.

    Attributes:
        launcher: One of `LAUNCHERS`, or `SPAWN`.
        num_ranks: Processes on this node; `python` starts only one.
        arguments: Arguments of train.py, or of the module.
        module: The module to run instead of train.py.
        place: The place of this node among several; None if it is the only one, where rank 0 gets a free port.
    """

    launcher: str
    num_ranks: int
    arguments: tuple[str, ...]
    module: str | None = None
    place: Place | None = None

    def command(self, folder: Path) -> list[str]:
        """Returns the command line.

        Args:
            folder: Where to write files that the launcher reads.

        Raises:
            RunError: The launcher is not installed.
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
        """Returns a tree for `from_json` on another node."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Launch:
        """Reads what `to_json` returned."""
        place = None if tree["place"] is None else Place(**tree["place"])
        return cls(**{**tree, "arguments": tuple(tree["arguments"]), "place": place})

    def _deepspeed_ranks(self, folder: Path) -> list[str]:
        devices = visible_devices() if count_gpus() > 0 else []  # --num_gpus ignores CUDA_VISIBLE_DEVICES
        if self.place is None:
            ranks = ["--include", "localhost:" + ",".join(devices[: self.num_ranks])] if devices else []
            return ["--hostfile", os.devnull, *(ranks or ["--num_gpus", str(self.num_ranks)])]
        # Placeholder names: with --no_ssh the launcher does not resolve them.
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
        launcher: The launcher's name.
        ranks: The ranks that have started.
        outcomes: The outcomes that ranks have reported.
        lost_launcher: Whether the launcher was seen to end before its ranks.
        launcher_code: The launcher's exit code; None if it had to be killed.
        fault: Why the attempt failed, if the reason is outside the ranks.
    """

    launcher: str
    ranks: tuple[int, ...]
    outcomes: dict[int, RankOutcome]
    lost_launcher: bool = False
    launcher_code: int | None = None
    fault: str = ""

    @classmethod
    def merge(cls, reports: Iterable[Report], fault: str = "") -> Report:
        """Merges the reports of all nodes; `fault` names the nodes that were lost."""
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
        """Returns a tree for `from_json` on another node."""
        return {**asdict(self), "outcomes": {str(rank): asdict(one) for rank, one in self.outcomes.items()}}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Report:
        """Reads what `to_json` returned, after it was sent as JSON."""
        outcomes = {int(rank): RankOutcome(**outcome) for rank, outcome in tree["outcomes"].items()}
        return cls(**{**tree, "ranks": tuple(tree["ranks"]), "outcomes": outcomes})

    @property
    def codes(self) -> set[int]:
        """The exit codes that ranks have reported."""
        return {outcome.code for outcome in self.outcomes.values()}

    def failure(self) -> str:
        """Returns in one line why an attempt failed: a rank's own reason, else which process ended without one."""
        reasons = [(rank, outcome.reason) for rank, outcome in sorted(self.outcomes.items()) if outcome.reason]
        root_causes = [(rank, reason) for rank, reason in reasons if "lost contact" not in reason]
        unreported = sorted(rank for rank in self.ranks if rank not in self.outcomes)
        if self.fault:
            return self.fault
        if root_causes:
            rank, reason = root_causes[0]
            return reason if reason.startswith("rank ") else f"rank {rank}: {reason}"
        if self.lost_launcher:
            return f"{self.launcher} ended while ranks were running"
        if unreported:
            return f"rank {', '.join(map(str, unreported))} was killed or crashed"
        if reasons:
            return reasons[0][1]
        if not self.ranks:
            return f"{self.launcher} ended with code {self.launcher_code} before it had started a rank"
        return "the ranks ended without writing the completion marker"


class Attempt:
    """A launcher in a session of its own, and the ranks that register themselves.

    Args:
        launch: What to start.
        log_event: Called with one line for each event.
        output: Where the processes print; None: where this one does.
    """

    def __init__(self, launch: Launch, log_event: Callable[[str], None], output: IO[bytes] | None = None) -> None:
        self._launch = launch
        self._log_event = log_event
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
        log_event(f"started {launch.launcher} (process {self._launcher.pid}) for {launch.num_ranks} rank{plural}")

    def wait(self, requests: Sequence[int] = (), is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Waits until the attempt is over and none of its processes is left.

        Args:
            requests: Signals for every rank; a handler may append to it meanwhile. A second SIGINT, or any signal
                before the first rank has started, kills all processes at once.
            is_cancelled: Polled repeatedly; once it returns true, all processes are killed at once.
        """
        deadline: float | None = None
        while not is_cancelled() and not self._is_over(requests):
            now = time.monotonic()
            if deadline is None and (seconds := self._seconds_to_end()) is not None:
                deadline = now + seconds
            if deadline is not None and now > deadline:
                break
            time.sleep(POLL_SECONDS)
        self.kill()

    def poll(self) -> bool:
        """Finds ranks that have started. Returns whether the launcher or a rank still runs."""
        for rank, pid in read_registered_ranks(self._folder).items():
            if rank not in self.ranks:
                try:
                    self.ranks[rank] = psutil.Process(pid)
                except psutil.NoSuchProcess:
                    continue
        return self._launcher.poll() is None or bool(self._running_ranks())

    def processes(self) -> list[psutil.Process]:
        """Returns all running processes of this attempt, also those that have left the launcher's process tree."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(RANKS_FOLDER) == str(self._folder) and is_alive(process):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def kill(self) -> None:
        """Kills all processes of this attempt, even suspended ones, and waits until they have ended."""
        end = time.monotonic() + KILL_SECONDS
        if not self._is_killed:  # the exit code of a launcher killed here means nothing
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
            self._log_event(f"process {', '.join(str(process.pid) for process in left)} cannot be killed")
        else:
            self._launcher.wait()

    def outcomes(self) -> dict[int, RankOutcome]:
        """Returns the outcomes that ranks have reported."""
        return read_outcomes(self._folder)

    def close(self) -> Report:
        """Removes the folder in which the ranks report, and returns the report."""
        outcomes = self.outcomes()
        shutil.rmtree(self._folder, ignore_errors=True)
        lost_launcher = self._lost_launcher or any(outcome.is_orphan for outcome in outcomes.values())
        code = self._launcher_code
        return Report(self._launch.launcher, tuple(sorted(self.ranks)), outcomes, lost_launcher, code)

    def _environment(self) -> dict[str, str]:
        # The same for every launcher; torchrun would set 1.
        environment = {"OMP_NUM_THREADS": str(threads_per_rank({}, self._launch.num_ranks)), **os.environ}
        if count_gpus() == 0:
            environment.setdefault("DS_ACCELERATOR", "cpu")
        return {**environment, SUPERVISOR: str(os.getpid()), RANKS_FOLDER: str(self._folder)}

    def _is_over(self, requests: Sequence[int]) -> bool:
        """Forwards requests to the ranks. Returns whether nothing runs any more, or all must be killed at once."""
        is_running = self.poll()
        for rank, process in self.ranks.items():
            for number in requests[self._signals_sent.get(rank, 0) :]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
                self._signals_sent[rank] = self._signals_sent.get(rank, 0) + 1
        is_stopped_before_start = bool(requests) and not self.ranks
        return not is_running or is_stopped_before_start or list(requests).count(signal.SIGINT) > 1

    def _seconds_to_end(self) -> float | None:
        """Returns how long to wait for the rest of an attempt that is ending; None while it is not."""
        launcher_has_ended = self._launcher.poll() is not None  # checked before the ranks, which end first
        running = self._running_ranks()
        if launcher_has_ended and running:
            self._lost_launcher = True
            plural = "s are" if len(running) > 1 else " is"
            self._log_event(f"{self._launch.launcher} has ended while {len(running)} rank{plural} running; stopping")
            return ORPHAN_GRACE_SECONDS + TEARDOWN_SECONDS
        outcomes = self.outcomes()
        ended = [rank for rank in self.ranks if rank not in running]
        good = (EXIT_DONE, EXIT_STOPPED)
        if any(rank not in outcomes or outcomes[rank].code not in good for rank in ended):
            return TEARDOWN_SECONDS
        return TEARDOWN_SECONDS if len(ended) == self._launch.num_ranks else None

    def _running_ranks(self) -> list[int]:
        return [rank for rank, process in self.ranks.items() if is_alive(process)]


def visible_devices() -> list[str]:
    """Returns the entries of CUDA_VISIBLE_DEVICES; an empty list if it is not set."""
    return [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]


def count_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may use, without importing torch."""
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
    """Returns the path of a program next to this interpreter, or else on the PATH."""
    sibling = Path(sys.executable).parent / name
    found = str(sibling) if sibling.exists() else shutil.which(name)
    if found is None:
        raise RunError(f"--launcher {name}: no such program next to {sys.executable} or on the PATH")
    return found
