"""A run as a SLURM job: reads the options, renders the script, and submits it."""

from __future__ import annotations

import argparse
import operator
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError
from configs.load import load_config
from configs.resume import allows_repeated_starts
from configs.schema import Config
from launch import PROJECT_ROOT
from launch.errors import EXIT_DONE, EXIT_FAILURE
from launch.run_folder.folder import RunFolder

_TEMPLATE = Path(__file__).parent / "job.sh"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
# SLURM's formats: minutes[:seconds], hours:minutes:seconds, and days-hours[:minutes[:seconds]].
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")


@dataclass(frozen=True)
class Job:
    """What to request from SLURM.

    Attributes:
        nodes: The number of nodes.
        ranks_per_node: The number of tasks on each node, one per rank.
        time: The time limit in SLURM's format.
        stop_seconds: How long before the limit the run is asked to stop.
        directives: More options of sbatch, without their dashes.
        environment: Environment variables of the tasks.
        srun_options: More options of srun, e.g. for containers.
        python: The interpreter that runs the tasks.
    """

    nodes: int
    ranks_per_node: int
    time: str
    stop_seconds: int
    directives: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    srun_options: tuple[str, ...]
    python: str


def read_job(options: argparse.Namespace) -> tuple[Config, Job]:
    """Returns the run's configuration and its job.

    Raises:
        ConfigError: One line for each problem of the command line, the configuration and this machine.
    """
    problems: list[str] = []
    config = None
    try:
        config = load_config(options.config, options.overrides)
    except ConfigError as error:
        problems += error.problems
    if config is not None and not allows_repeated_starts(config.run.resume):
        problems.append(
            f"run.resume: {config.run.resume!r} is not allowed in a job that is requeued after each stop; expected "
            "'auto' (run.init_from starts a new run from another one's weights)"
        )
    gpus, ranks = options.gpus_per_node, options.ranks_per_node
    if (gpus is None) == (ranks is None):
        problems.append("--gpus-per-node, --ranks-per-node: expected exactly one of the two (the second is for CPU)")
    nodes = _positive("--nodes", options.nodes, problems)
    ranks_per_node = _positive(
        "--gpus-per-node" if ranks is None else "--ranks-per-node", gpus if ranks is None else ranks, problems
    )
    stop_seconds = _positive("--stop-seconds", options.stop_seconds, problems)
    cpus_per_rank = _positive("--cpus-per-rank", options.cpus_per_rank, problems)
    _check_time(options.time, stop_seconds, problems)
    environment = _read_environment(options.env, problems)
    if ranks is not None:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    for name in ("partition", "account", "container", "container_mounts", "python"):
        if getattr(options, name) == "":  # e.g. from an unset shell variable
            problems.append(f"--{name.replace('_', '-')}: is empty; give it a value, or leave it out")
    directives = [f"gpus-per-node={gpus}"] if gpus is not None else []
    if cpus_per_rank is not None:
        directives.append(f"cpus-per-task={cpus_per_rank}")
        environment = {"SRUN_CPUS_PER_TASK": str(cpus_per_rank), "OMP_NUM_THREADS": str(cpus_per_rank), **environment}
    directives += [
        f"{name}={value}" for name in ("partition", "account") if (value := getattr(options, name)) is not None
    ]
    directives += [option.removeprefix("--") for option in options.sbatch]
    problems += [
        f"{option!r}: an option of sbatch or of the container must be a single line"
        for option in (*directives, options.container or "", options.container_mounts or "")
        if "\n" in option
    ]
    if options.container_mounts is not None and options.container is None:
        problems.append(f"--container-mounts {options.container_mounts}: needs --container")
    if not options.print and shutil.which("sbatch") is None:
        problems.append("sbatch: no such program on the PATH; submit on a login node of the cluster, or use --print")
    if problems:
        raise ConfigError(problems)
    assert config is not None and nodes is not None and ranks_per_node is not None and stop_seconds is not None
    container = [("container-image", options.container), ("container-mounts", options.container_mounts)]
    srun_options = [f"--{name}={value}" for name, value in container if value is not None]
    if options.container is not None:
        srun_options.append(f"--container-workdir={Path.cwd()}")
    python = options.python or ("python3" if options.container else sys.executable)
    return config, Job(
        nodes,
        ranks_per_node,
        options.time,
        stop_seconds,
        tuple(directives),
        tuple(environment.items()),
        tuple(srun_options),
        python,
    )


def render(job: Job, config: Config, arguments: Sequence[str], folder: Path) -> str:
    """Returns the job's script.

    Args:
        job: What to request from SLURM.
        config: The configuration of the run.
        arguments: The arguments of train.py.
        folder: The working directory of the tasks, to which relative paths in the configuration refer.
    """
    run = _run_folder(config, folder)
    values = {
        "job_name": shlex.quote(run.name),
        "nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "time": job.time,
        "stop_seconds": job.stop_seconds,
        "output": shlex.quote(f"{run}-slurm-".replace("%", "%%") + "%j.out"),
        "directives": "".join(f"#SBATCH {shlex.quote(f'--{option}')}\n" for option in job.directives),
        "project": shlex.quote(str(PROJECT_ROOT)),
        "folder": shlex.quote(str(folder)),
        "run": shlex.quote(str(run)),
        "arguments": shlex.join(arguments),
        "environment": "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment),
        "srun_options": "".join(f" {shlex.quote(option)}" for option in job.srun_options),
        "python": shlex.quote(job.python),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), text)


def submit(script: str, config: Config) -> int:
    """Submits a script with sbatch and prints the job's number. Returns the exit code."""
    run = _run_folder(config, Path.cwd())
    try:
        run.parent.mkdir(parents=True, exist_ok=True)  # for the job's output
    except OSError as error:
        print(f"error: run.dir: {run.parent} cannot be created: {error}", file=sys.stderr)
        return EXIT_FAILURE
    finished = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        reason = " ".join(finished.stderr.removeprefix("sbatch: error: ").split())
        print(f"error: sbatch rejected the job: {reason}", file=sys.stderr)
        return EXIT_FAILURE
    job_id = finished.stdout.strip().split(";")[0]
    print(job_id)
    print(f"output: {run}-slurm-{job_id}.out", file=sys.stderr)
    return EXIT_DONE


def _run_folder(config: Config, folder: Path) -> Path:
    return folder / RunFolder.of(config).path


def _positive(option: str, text: str | None, problems: list[str]) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        problems.append(f"{option}: {text!r} is not valid; expected an integer of at least 1")
        return None
    return int(text)


def _check_time(text: str, stop_seconds: int | None, problems: list[str]) -> None:
    """Checks that the time limit has one of SLURM's formats, and is longer than `stop_seconds`."""
    match = _TIME.fullmatch(text)
    if match is None:
        problems.append(
            f"--time: {text!r} is not a time; expected minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            "days-hours:minutes or days-hours:minutes:seconds"
        )
        return
    fields = [int(field) for field in match["fields"].split(":")]
    if match["days"] is not None:
        units = (3600, 60, 1)
    else:
        units = {1: (60, 0, 0), 2: (60, 1, 0), 3: (3600, 60, 1)}[len(fields)]
    seconds = 86400 * int(match["days"] or 0) + sum(map(operator.mul, fields, units))
    if stop_seconds is not None and seconds <= stop_seconds:
        problems.append(
            f"--time: {text} is not longer than --stop-seconds {stop_seconds}, the time before the limit at which the "
            "run is asked to stop"
        )


def _read_environment(entries: Sequence[str], problems: list[str]) -> dict[str, str]:
    environment = {}
    for entry in entries:
        name, separator, value = entry.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            problems.append(f"--env: {entry!r}: expected NAME=VALUE")
        environment[name] = value
    return environment
