"""Runs cells concurrently, each in a process of its own on its share of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from configs.errors import ConfigError
from launch.errors import EXIT_DONE, EXIT_STOPPED
from launch.run_folder.observe import Progress
from launch.supervisor.attempt import count_gpus, visible_devices
from launch.sweep.cell_run import Signals
from launch.sweep.cells import Cell
from launch.sweep.outcome import cell_folder, failure, last_step, log_file, mark_failed, state_of
from launch.sweep.spec import Sweep
from launch.sweep.table import Screen, Status

POLL_SECONDS = 0.2
THREADS = "OMP_NUM_THREADS"
ENDED = ("finished", "diverged")
STARTED_BY = "--started-by"  # option of launch.sweep, for the processes started here

Slot = dict[str, str]  # environment variables that give a cell its share of the machine


@dataclass
class _Running:
    index: int
    process: subprocess.Popen[bytes]
    slot: Slot
    progress: Progress
    num_steps: int
    num_signals: int = 0


def make_slots(processes: int | None, ranks: int, cores: int, devices: Sequence[str]) -> list[Slot]:
    """Returns one slot for each cell that runs at once: its GPUs, or the number of threads of each of its ranks.

    Args:
        processes: The number of slots; None for as many as fit.
        devices: The entries of CUDA_VISIBLE_DEVICES; if empty, cells run on the CPU.

    Raises:
        ConfigError: The slots do not fit on the GPUs.
    """
    if not devices:
        count = processes or max(1, cores // ranks)
        return [{THREADS: str(max(1, cores // (count * ranks)))}] * count
    fitting = len(devices) // ranks
    if fitting < (processes or 1):
        needed = (processes or 1) * ranks
        raise ConfigError([f"processes, ranks: {needed} GPUs are needed, and this node shows {len(devices)}"])
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(devices[start * ranks : (start + 1) * ranks])}
        for start in range(processes or fitting)
    ]


def slots_here(sweep: Sweep, processes: int | None) -> list[Slot]:
    """Returns the slots of this machine. OMP_NUM_THREADS is kept if it is set already. Raises ConfigError."""
    devices = visible_devices() if "CUDA_VISIBLE_DEVICES" in os.environ else []
    num_gpus = count_gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = devices[:num_gpus] or [str(number) for number in range(num_gpus)]
    slots = make_slots(processes or sweep.processes, sweep.ranks, cores, devices)
    return [
        {key: value for key, value in slot.items() if key != THREADS or THREADS not in os.environ} for slot in slots
    ]


class Pool:
    """Starts cells as slots become free, until all have ended or a signal arrives.

    Args:
        path: The path of the sweep file.
        requests: Signals to this process; they are forwarded to every cell, and no more cells are started.
        screen: Shows `statuses`, and a line when a cell has ended.

    Attributes:
        statuses: The statuses of all cells given to `set_cells`.
    """

    def __init__(self, sweep: Sweep, path: str, slots: Sequence[Slot], requests: Signals, screen: Screen) -> None:
        self._sweep = sweep
        self._path = path
        self._slots = list(slots)
        self._requests = requests
        self._screen = screen
        self.statuses: dict[Cell, Status] = {}

    def set_cells(self, cells: Sequence[Cell]) -> None:
        """Sets all cells of the sweep with their current states, replacing earlier ones."""
        self.statuses = {
            cell: Status("waiting" if cell.waits_for_pilot else state_of(self._sweep, cell)) for cell in cells
        }

    def failed(self) -> list[Cell]:
        """Returns the cells that failed."""
        return [cell for cell, status in self.statuses.items() if status.state == "failed"]

    def run(self, cells: dict[int, Cell]) -> None:
        """Runs the cells (by index) that are not finished or diverged; returns when none is running."""
        waiting = [index for index, cell in cells.items() if self.statuses[cell].state not in ENDED]
        running: list[_Running] = []
        lost: set[int] = set()
        try:
            while running or (waiting and not self._requests):
                while waiting and self._slots and not self._requests:
                    index = waiting.pop(0)
                    running.append(self._start(index, cells[index], self._slots.pop()))
                for entry in list(running):
                    self._poll(entry, cells[entry.index])
                    if entry.process.poll() is not None:
                        running.remove(entry)
                        self._slots.append(entry.slot)
                        if self._is_lost(entry.process.returncode) and entry.index not in lost:
                            lost.add(entry.index)
                            waiting.append(entry.index)
                            self._note_loss(cells[entry.index], entry.process.returncode)
                        else:
                            self._note_end(cells[entry.index], entry.process.returncode)
                self._screen.show(self.statuses)
                time.sleep(POLL_SECONDS)
        finally:
            for entry in running:  # only after an exception here
                entry.process.terminate()

    def _start(self, index: int, cell: Cell, slot: Slot) -> _Running:
        log = log_file(self._sweep, cell)
        log.parent.mkdir(parents=True, exist_ok=True)
        progress = Progress(cell_folder(self._sweep, cell))
        arguments = [self._path, "--cell", str(index), STARTED_BY, str(os.getpid())]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.sweep", *arguments],
                env={**os.environ, **slot},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches it only once, through this process
            )
        self.statuses[cell].state = "running"
        return _Running(index, process, slot, progress, last_step(self._sweep, cell))

    def _poll(self, entry: _Running, cell: Cell) -> None:
        for number in self._requests[entry.num_signals :]:
            entry.process.send_signal(number)
            entry.num_signals += 1
        self.statuses[cell].fraction = entry.progress.last_step() / entry.num_steps

    def _is_lost(self, exit_code: int) -> bool:
        """Returns whether a signal killed the process of a cell, which then could not retry by itself."""
        return exit_code < 0 and not self._requests

    def _note_loss(self, cell: Cell, exit_code: int) -> None:
        self.statuses[cell] = Status(state_of(self._sweep, cell))
        self._screen.log(f"{cell.name}: its process was killed by signal {-exit_code}; retrying once")

    def _note_end(self, cell: Cell, exit_code: int) -> None:
        state = state_of(self._sweep, cell)
        reason = failure(self._sweep, cell) or f"its process ended with code {exit_code}"
        if exit_code not in (EXIT_DONE, EXIT_STOPPED) and not self._requests:
            state = "failed"
            mark_failed(self._sweep, cell, reason)
        self.statuses[cell] = Status(state)
        labels = {"failed": f"failed: {reason}; see {log_file(self._sweep, cell)}", "begun": "stopped"}
        done = sum(status.state in ENDED for status in self.statuses.values())
        self._screen.log(f"{cell.name}: {labels.get(state, state)} ({done} of {len(self.statuses)} cells done)")
