"""Generates a SLURM array script in which each task runs one cell."""

from __future__ import annotations

import shlex

from launch.sweep.cells import Cell
from launch.sweep.spec import Sweep


def array_script(sweep: Sweep, path: str, cells: list[Cell]) -> str:
    """Returns the text of the script, which has a comment on how to submit it.

    Args:
        path: The path of the sweep file, as written into the script.
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
            "# An array task runs or resumes one cell. The job without an array runs the remaining cells, times",
            "# the arms and writes the report. Save this file as sweep.sh and submit it from the project's folder:",
            *(f"#     {step}" for step in steps),
            "set -euo pipefail",
            *sweep.slurm.setup.splitlines(),
            "# exec makes SLURM's signal before the time limit reach the sweep, which then saves.",
            f"exec python -m launch.sweep {name} ${{SLURM_ARRAY_TASK_ID:+--cell $SLURM_ARRAY_TASK_ID}}",
            "",
        ]
    )
