"""What `launch.submit` renders and refuses, without SLURM; `slurm/test_jobs.py` runs its jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import ConfigError
from launch.slurm.job import read_job, render
from launch.submit import parse_arguments
from tests.conftest import ROOT, python

GPUS = ["--nodes", "2", "--gpus-per-node", "8", "--time", "4:00:00", "--print"]


def rendered(config: Path, *arguments: str, folder: Path = ROOT) -> str:
    options = parse_arguments([str(config), *arguments])
    loaded, job = read_job(options)
    return render(job, loaded, (options.config, *options.overrides), folder)


def problems(config: Path, *arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read_job(parse_arguments([str(config), *arguments]))
    return list(raised.value.problems)


def test_the_script_contains_all_options(tiny_config: Path, tmp_path: Path) -> None:
    image = ["--container", "registry#image:1", "--container-mounts", "/data:/data,/home"]
    script = rendered(
        tiny_config,
        "optim.lr=1e-3",
        *GPUS,
        *(
            "--partition",
            "big",
            "--account",
            "lab",
            "--sbatch=--qos=high",
            "--sbatch",
            "comment=my job",
            "--cpus-per-rank",
            "12",
        ),
        *("--env", "NCCL_DEBUG=INFO", "--env", "GREETING=it's 5 $", "--stop-seconds", "600", *image),
    )
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "#SBATCH --job-name=tiny",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --time=4:00:00",
        f"#SBATCH --output={tmp_path}/runs/tiny-slurm-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@600",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --partition=big",
        "#SBATCH --account=lab",
        "#SBATCH --qos=high",
        "#SBATCH '--comment=my job'",
    ]
    first_command = script.index("set -uo pipefail")
    assert all(script.index(line) < first_command for line in directives)  # sbatch reads no further
    assert (
        "start=(srun --kill-on-bad-exit=1 '--container-image=registry#image:1' --container-mounts=/data:/data,/home "
        f"--container-workdir={ROOT} python3)\n" in script
    )
    assert "{{" not in script
    exports = "".join(line + "\n" for line in script.splitlines() if line.startswith("export") and "=" in line)
    shown = subprocess.run(
        ["bash", "-c", f'project=/p; {exports}\necho "$NCCL_DEBUG|$GREETING|$OMP_NUM_THREADS|$SRUN_CPUS_PER_TASK"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "INFO|it's 5 $|12|12\n"
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_cpu_job_requests_no_gpus(tiny_config: Path) -> None:
    script = rendered(tiny_config, "--nodes", "1", "--ranks-per-node", "2", "--time", "1-12", "--print")
    assert "--gpus" not in script
    assert "export DS_ACCELERATOR=cpu" in script
    assert f"start=(srun --kill-on-bad-exit=1 {sys.executable})\n" in script


@pytest.mark.parametrize("time", ["6", "5:01", "1:00:00", "1-0", "1-00:30", "2-01:02:03"])
def test_slurm_time_formats_are_accepted(time: str, tiny_config: Path) -> None:
    assert f"--time={time}\n" in rendered(
        tiny_config, "--nodes", "1", "--gpus-per-node", "1", "--time", time, "--print"
    )


@pytest.mark.parametrize("time", ["4h", "1:2:3:4", "", "-1", "1-", "1-2:3:4:5", "4:00:00\n"])
def test_other_time_formats_are_rejected(time: str, tiny_config: Path) -> None:
    (problem,) = problems(tiny_config, "--nodes", "1", "--gpus-per-node", "1", f"--time={time}", "--print")
    assert problem.startswith(f"--time: {time!r} is not a time; expected minutes, ")


def test_a_time_limit_within_stop_seconds_is_rejected(tiny_config: Path) -> None:
    assert problems(tiny_config, "--nodes", "1", "--gpus-per-node", "1", "--time", "5", "--print") == [
        "--time: 5 is not longer than --stop-seconds 300, the time before the limit at which the run is asked to stop"
    ]


def test_all_problems_are_reported_at_once(tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems of the configuration, the command line and the machine; nothing is submitted or created."""
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["--nodes", "0", "--gpus-per-node", "x", "--time", "soon", "--env", "9=1", "--container-mounts", "/a"]
    assert problems(tiny_config, "optim.lrr=1", *arguments) == [
        "optim.lrr: unknown key; did you mean optim.lr?",
        "--nodes: '0' is not valid; expected an integer of at least 1",
        "--gpus-per-node: 'x' is not valid; expected an integer of at least 1",
        "--time: 'soon' is not a time; expected minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
        "days-hours:minutes or days-hours:minutes:seconds",
        "--env: '9=1': expected NAME=VALUE",
        "--container-mounts /a: needs --container",
        "sbatch: no such program on the PATH; submit on a login node of the cluster, or use --print",
    ]
    empty = ["--ranks-per-node=", "--partition=", "--account=", "--container=", "--container-mounts=", "--python="]
    assert problems(tiny_config, "--nodes", "1", "--time", "9", *empty, "--print") == [
        "--ranks-per-node: '' is not valid; expected an integer of at least 1",
        *(f"{option[:-1]}: is empty; give it a value, or leave it out" for option in empty[1:]),
    ]
    assert problems(
        tiny_config, "run.resume=never", "--nodes", "1", "--time", "9", "--sbatch", "a=b\nrm", "--print"
    ) == [
        "run.resume: 'never' is not allowed in a job that is requeued after each stop; expected 'auto' "
        "(run.init_from starts a new run from another one's weights)",
        "--gpus-per-node, --ranks-per-node: expected exactly one of the two (the second is for CPU)",
        "'a=b\\nrm': an option of sbatch or of the container must be a single line",
    ]


def test_the_command_prints_the_script_or_problems(tiny_config: Path, tmp_path: Path) -> None:
    finished = python("-m", "launch.submit", tiny_config, *GPUS)
    assert finished.code == 0
    assert finished.output == rendered(tiny_config, *GPUS)
    assert not (tmp_path / "runs").exists()
    finished = python("-m", "launch.submit", tiny_config, *GPUS, "--gpus-per-node", "none")
    assert finished.code == 2
    assert finished.errors == "error: --gpus-per-node: 'none' is not valid; expected an integer of at least 1\n"
    code = "import sys, launch.submit\nassert not {'torch', 'deepspeed'} & set(sys.modules)"
    assert python("-c", code).code == 0


def test_folder_names_may_contain_spaces(tiny_config: Path, tmp_path: Path) -> None:
    script = rendered(tiny_config, "run.dir=my runs", *GPUS, folder=tmp_path)
    assert f"#SBATCH --output='{tmp_path}/my runs/tiny-slurm-%j.out'" in script
    assert f"run='{tmp_path}/my runs/tiny'" in script
