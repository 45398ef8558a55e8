"""Runs one configuration with different learning rates and query/key settings, and reports the results.

Every cell is a run of train.py in a folder of its own. The same command resumes a sweep that was stopped or killed.
Exit codes: 0 all cells ended (including diverged ones) and the report is written, 1 an error or failed cells, 2 wrong
usage, 75 stopped on request.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from configs.errors import ConfigError
from configs.load import to_yaml
from data.files import write_file
from launch.cli import positive_integer
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE, RunError
from launch.sweep.analysis import choose_alphas, measure
from launch.sweep.cell_run import Signals, run_cell
from launch.sweep.cells import Alphas, Cell, check_cells, expand, with_alpha
from launch.sweep.lock import locked
from launch.sweep.outcome import failure, state_of
from launch.sweep.pool import STARTED_BY, Pool, Slot, slots_here
from launch.sweep.recommend import recommend
from launch.sweep.results import read_runs
from launch.sweep.slurm import array_script
from launch.sweep.spec import Sweep, load_sweep
from launch.sweep.table import Screen
from launch.sweep.timing import read_timing, time_arms


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit code."""
    options = parse_arguments(arguments)
    try:
        sweep = load_sweep(options.sweep)
        return run(sweep, options)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader closed the pipe, as in `--list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.sweep", description=__doc__)
    parser.add_argument("sweep", metavar="SWEEP.yaml", help="the sweep, see configs/sweeps/ and docs/sweeps.md")
    parser.add_argument(
        "--processes",
        type=positive_integer,
        metavar="N",
        help="number of cells that run at once, instead of the file's",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print the cells with their numbers and states; run nothing")
    what.add_argument("--report", action="store_true", help="write the report of the results so far; run nothing")
    what.add_argument(
        "--recommend", action="store_true", help="print which learning rate and alpha to use; run nothing"
    )
    what.add_argument("--print-slurm", action="store_true", help="print a SLURM array script; run nothing")
    what.add_argument("--cell", type=int, metavar="INDEX", help="run only this cell, as a task of such an array does")
    parser.add_argument(STARTED_BY, type=int, dest="parent", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(sweep: Sweep, options: argparse.Namespace) -> int:
    """Does what the command line asks for and returns the exit code."""
    cells = expand(sweep)
    if options.cell is not None:
        return run_one(sweep, cells, options.cell, options.parent)
    if options.report or options.recommend:
        check_cells(sweep, known_cells(sweep, cells), with_data=False)
        return show_results(sweep, cells, options.recommend)
    check_cells(sweep, cells)
    if options.print_slurm:
        print(array_script(sweep, options.sweep, cells), end="")
        return EXIT_DONE
    if options.list:
        for index, cell in enumerate(known_cells(sweep, cells)):
            state = "waiting for its pilot" if cell.waits_for_pilot else state_of(sweep, cell)
            print(f"{index:>4}  {cell.name:<40}  {state}")
        return EXIT_DONE
    slots = slots_here(sweep, options.processes)
    with locked(sweep):
        write_file(sweep.folder / "sweep.yaml", to_yaml(sweep).encode())
        return run_all(sweep, options.sweep, cells, slots)


def run_one(sweep: Sweep, cells: Sequence[Cell], index: int, parent: int | None) -> int:
    """Runs the cell with this index and returns the exit code."""
    if not 0 <= index < len(cells):
        raise ConfigError([f"--cell {index}: the sweep has cells 0 to {len(cells) - 1}"])
    cell = with_alpha(cells[index], alphas_so_far(sweep, cells))
    check_cells(sweep, [cell])
    exit_code = run_cell(sweep, cell, parent)
    if exit_code == EXIT_FAILURE:
        print(f"error: {cell.name}: {failure(sweep, cell) or 'interrupted'}", file=sys.stderr)
    return exit_code


def run_all(sweep: Sweep, path: str, cells: Sequence[Cell], slots: Sequence[Slot]) -> int:
    """Runs pilots, grids and timing, writes the report, and returns the exit code."""
    requests = Signals()
    requests.listen()
    screen = Screen()
    pool = Pool(sweep, path, slots, requests, screen)
    pool.set_cells(cells)
    screen.log(f"{len(cells)} cell(s), {len(slots)} at once, in {sweep.folder}")
    pool.run({index: cell for index, cell in enumerate(cells) if cell.is_pilot})
    resolved = known_cells(sweep, cells)
    check_cells(sweep, resolved)
    pool.set_cells(resolved)
    pool.run({index: cell for index, cell in enumerate(resolved) if not cell.is_pilot and not cell.waits_for_pilot})
    failed = [f"{cell.name}: {failure(sweep, cell) or 'failed'}" for cell in pool.failed()]
    if not requests:
        runs = read_runs(sweep, resolved)
        try:
            time_arms(sweep, measure(sweep, runs, {}), resolved, requests, screen.log)
        except RunError as error:
            failed.append(str(error))
    screen.end(pool.statuses)
    if requests:
        screen.log("stopped on request; the same command resumes the sweep")
        return EXIT_STOPPED
    show_results(sweep, cells, only_advice=False)
    waiting = sorted({f"{cell.grid}, {cell.arm}" for cell in resolved if cell.waits_for_pilot})
    failed += [f"{who}: waits for its pilot, which has failed cells" for who in waiting]
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return EXIT_FAILURE if failed else EXIT_DONE


def show_results(sweep: Sweep, cells: Sequence[Cell], only_advice: bool) -> int:
    """Prints the recommendation, or writes the report and prints the findings."""
    from launch.sweep.findings import describe_grid
    from launch.sweep.report import write_report

    resolved = known_cells(sweep, cells)
    runs = read_runs(sweep, resolved)
    grids = measure(sweep, runs, read_timing(sweep))
    if only_advice:
        print("\n\n".join(recommend(sweep, grid) for grid in grids))
        return EXIT_DONE
    folder = write_report(sweep, grids, runs)
    for grid in grids:
        print(f"{grid.name}: {describe_grid(grid)}")
    print(f"report: {folder / 'report.md'}")
    return EXIT_DONE


def known_cells(sweep: Sweep, cells: Sequence[Cell]) -> list[Cell]:
    """Returns the cells with the alphas that the pilots chose; unchanged if their pilot is not complete."""
    alphas = alphas_so_far(sweep, cells)
    return [with_alpha(cell, alphas) if (cell.grid, cell.arm) in alphas else cell for cell in cells]


def alphas_so_far(sweep: Sweep, cells: Sequence[Cell]) -> Alphas:
    """Returns the alphas that the complete pilots chose."""
    return choose_alphas(sweep, read_runs(sweep, [cell for cell in cells if cell.is_pilot]))


if __name__ == "__main__":
    sys.exit(main())
