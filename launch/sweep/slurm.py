"""A SLURM array script of which each task runs one cell."""

from __future__ import annotations

import shlex

from launch.sweep.cells import Cell
from launch.sweep.spec import Sweep


def array_script(sweep: Sweep, path: str, cells: list[Cell]) -> str:
    """The text of the script; a comment says how to submit it.

    Args:
        path: of the sweep file, as the script shall name it.
    """
    num_pilots = sum(cell.is_pilot for cell in cells)
    last = len(cells) - 1
    limit = f"%{sweep.slurm.max_running}"
    grid = f"--array={num_pilots}-{last}{limit}"
    steps = []
    if num_pilots:
        steps.append(f"pilot=$(sbatch --parsable --array=0-{num_pilots - 1}{limit} sweep.sh)")
        grid = f"--dependency=afterany:$pilot {grid}"
    steps.append(f"grid=$(sbatch --parsable {grid} sweep.sh)")
    steps.append("sbatch --dependency=afterany:$grid sweep.sh")
    name = shlex.quote(path)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={sweep.name}",
            "#SBATCH --nodes=1",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --signal=B:TERM@120",
            *(f"#SBATCH {option}" for option in sweep.slurm.options),
            "#",
            "# An array task runs one cell, or goes on where it was. The job without an array runs what is left, times",
            "# the arms and writes the report. Submit it from the project's folder, saved as sweep.sh:",
            *(f"#     {step}" for step in steps),
            "set -euo pipefail",
            *sweep.slurm.setup.splitlines(),
            "# exec, so that SLURM's signal before the time limit reaches the sweep, which then saves.",
            f"exec python -m launch.sweep {name} ${{SLURM_ARRAY_TASK_ID:+--cell $SLURM_ARRAY_TASK_ID}}",
            "",
        ]
    )
