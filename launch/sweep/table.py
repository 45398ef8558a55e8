"""The progress table of a sweep: one line for each arm, one column for each learning rate, an entry for each seed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from launch.sweep.cells import Cell

SYMBOLS = {"finished": "done", "diverged": "div", "failed": "FAIL", "begun": "part", "waiting": "."}


@dataclass
class Status:
    """A cell in the table: its state (see `launch.sweep.outcome`), or `running` with the fraction of its steps done."""

    state: str
    fraction: float = 0.0


def table_lines(statuses: Mapping[Cell, Status]) -> list[str]:
    """Returns the lines of the table; each alpha of a pilot has a line of its own."""
    from tabulate import tabulate  # here, since importing it would slow down --help

    rows: dict[str, dict[float, list[str]]] = {}
    for cell, status in sorted(statuses.items(), key=lambda item: (not item[0].is_pilot, item[0].seed)):
        pilot = f" pilot alpha {cell.alpha:g}" if cell.is_pilot else ""
        entry = f"{100 * status.fraction:.0f}%" if status.state == "running" else SYMBOLS[status.state]
        rows.setdefault(f"{cell.grid} {cell.arm}{pilot}", {}).setdefault(cell.lr, []).append(entry)
    rates = sorted({cell.lr for cell in statuses})
    lines = [["", *(f"lr {rate:g}" for rate in rates)]]
    lines += [[name, *(" ".join(row.get(rate, ())) for rate in rates)] for name, row in rows.items()]
    table = tabulate(lines, tablefmt="plain", disable_numparse=True)
    return [line.rstrip() for line in table.splitlines()]


class Screen:
    """Shows the table in place on a terminal; elsewhere only the lines of `log`, and the table at the end."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._num_shown = 0
        self._last: list[str] = []

    def show(self, statuses: Mapping[Cell, Status]) -> None:
        """Redraws the table if it has changed."""
        lines = table_lines(statuses)
        if not self._is_terminal or lines == self._last:
            return
        self._clear()
        size = os.get_terminal_size()
        shown = [line[: size.columns - 1] for line in lines[: size.lines - 2]]
        sys.stdout.write("".join(line + "\n" for line in shown))
        sys.stdout.flush()
        self._num_shown, self._last = len(shown), lines

    def log(self, message: str) -> None:
        """Prints one line above the table."""
        self._clear()
        print(f"launch.sweep: {message}", flush=True)

    def end(self, statuses: Mapping[Cell, Status]) -> None:
        """Prints the final table."""
        self._clear()
        print("\n".join(table_lines(statuses)), flush=True)

    def _clear(self) -> None:
        if self._num_shown:
            sys.stdout.write(f"\x1b[{self._num_shown}A\x1b[J")
        self._num_shown, self._last = 0, []
