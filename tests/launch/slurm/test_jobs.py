"""Jobs of `launch.submit` in a real SLURM cluster: signalled, requeued, resumed, finished; cancelled; failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, Finished, finish, launcher_command, read_metrics, start
from tests.launch.helpers.requirements import require
from tests.launch.helpers.supervised import wait_for_steps, wait_until
from tests.launch.slurm.cluster import Cluster, slurm_cluster, why_not

pytestmark = pytest.mark.slow

STEPS = ("train.steps=200", "validation.every_steps=100")
ENDLESS = ("train.steps=100000",)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes of one CPU rank each."""
    require(why_not())
    with slurm_cluster() as running:
        yield running


class Submitted:
    """A job of `launch.submit`, on two nodes with one rank each."""

    def __init__(self, cluster: Cluster, config: Path, folder: Path, *overrides: str) -> None:
        self._cluster = cluster
        self.folder = folder
        options = ["--nodes", "2", "--ranks-per-node", "1", "--time", "10", "--cpus-per-rank", "1"]
        options += ["--sbatch", "comment=two words"]
        finished = submit(cluster, config, f"run.dir={folder.parent}", f"run.name={folder.name}", *overrides, *options)
        assert finished.code == 0, finished.errors
        self.id = finished.output.strip()
        self.ranks = folder.parent / f"{folder.name}-ranks-{self.id}"

    @property
    def output(self) -> str:
        path = self.folder.parent / f"{self.folder.name}-slurm-{self.id}.out"
        return path.read_text() if path.exists() else ""

    def is_in(self, *states: str) -> bool:
        return self._cluster.job(self.id)["JobState"] in states

    def wait_for(self, *states: str) -> None:
        wait_until(lambda: self.is_in(*states), f"{states} of job {self.id}: {self.output}")


def submit(cluster: Cluster, config: Path, *arguments: str) -> Finished:
    """Runs `launch.submit` in the environment of the cluster."""
    command = [sys.executable, "-m", "launch.submit", str(config), *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=cluster.environ, capture_output=True, text=True, check=False)
    return Finished(ended.returncode, ended.stdout, ended.stderr)


def test_a_signalled_job_is_requeued_and_finishes(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    """The losses are those of an uninterrupted run; the folder's name contains a space."""
    command = launcher_command("torchrun", 2, "train.py", str(tiny_config), *STEPS)
    finished = finish(start(command))
    assert finished.code == 0, finished.output + finished.errors

    job = Submitted(cluster, tiny_config, tmp_path / "my runs/queued", *STEPS)
    wait_for_steps(None, job.folder, 20)
    cluster.run("scancel", "--signal=USR1", job.id)
    job.wait_for("PENDING")
    stopped_at = len(read_metrics(job.folder))
    assert 20 <= stopped_at < 200
    assert [path.name for path in (job.folder / "checkpoints").iterdir()] == [f"step_{stopped_at:08d}"]
    # A node refuses credentials from before the end of the first start, in whole seconds; SLURM would wait for longer.
    wait_until(lambda: cluster.has_left(job.id), "the end of the first start")
    cluster.run("scontrol", "update", f"JobId={job.id}", "StartTime=now+2")
    job.wait_for("COMPLETED", "FAILED")

    assert job.is_in("COMPLETED"), job.output + cluster.explain(job.id)
    assert "stopped after a checkpoint; it is requeued" in job.output
    assert job.output.count("preflight: 2 ranks on 2 nodes ") == job.output.count("preflight: no problem found") == 2
    assert f"start 2 on n[1-2], from {job.folder}/checkpoints/step_{stopped_at:08d}" in job.output
    assert cluster.job(job.id)["Restarts"] == "1"
    assert "Comment=two words" in cluster.run("scontrol", "show", "job", job.id)
    assert (job.folder / "DONE").is_file()
    assert not job.ranks.exists()
    losses = [record["loss"] for record in read_metrics(job.folder)]
    assert losses == [record["loss"] for record in read_metrics(tmp_path / "runs/tiny")]


def test_a_killed_rank_fails_the_job(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    job = Submitted(cluster, tiny_config, tmp_path / "runs/killed", *ENDLESS)
    wait_for_steps(None, job.folder, 1)
    os.kill(int((job.ranks / "1.pid").read_text()), signal.SIGKILL)
    job.wait_for("FAILED", "COMPLETED", "PENDING")
    assert job.is_in("FAILED"), job.output + cluster.explain(job.id)
    assert "Exited with exit code 75" not in job.output
    assert cluster.job(job.id)["Restarts"] == "0"


def test_a_job_without_a_new_checkpoint_is_not_requeued(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    """A job that is signalled before its first step would be requeued for ever; others are stopped by the user.

    The last one is signalled by SLURM itself, before the time limit.
    """
    job = Submitted(cluster, tiny_config, tmp_path / "runs/early", *ENDLESS)
    wait_until(lambda: len(list(job.ranks.glob("*.pid"))) == 2, "two ranks")
    cluster.run("scancel", "--signal=USR1", job.id)
    job.wait_for("FAILED", "COMPLETED", "PENDING")
    assert cluster.job(job.id)["ExitCode"] == "75:0"
    assert "not requeued" in job.output

    job = Submitted(cluster, tiny_config, tmp_path / "runs/cancelled", *ENDLESS)
    wait_for_steps(None, job.folder, 1)
    cluster.run("scancel", job.id)
    job.wait_for("CANCELLED", "FAILED", "COMPLETED", "PENDING")
    assert job.is_in("CANCELLED")
    assert "it is requeued" not in job.output
    assert not job.ranks.exists()

    submitted_at = time.monotonic()
    job = Submitted(cluster, tiny_config, tmp_path / "runs/stopped", *ENDLESS)
    wait_for_steps(None, job.folder, 1)
    cluster.run("scontrol", "update", f"JobId={job.id}", "Requeue=0")
    # Three to four minutes are left; every 30 s SLURM checks whether a job is within --stop-seconds (300) of its limit.
    minutes = int(time.monotonic() - submitted_at) // 60 + 4
    cluster.run("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")
    job.wait_for("FAILED", "COMPLETED", "PENDING")
    assert cluster.job(job.id)["ExitCode"] == "75:0"
    assert "error: the job could not be requeued; submit it again to continue" in job.output
    assert len(list((job.folder / "checkpoints").iterdir())) == 1


def test_srun_starts_one_supervisor_on_each_node(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    """The node numbers come from srun; only the address must be given, since these nodes have no host names."""
    srun = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--label"]
    command = [sys.executable, "-m", "launch.run", str(tiny_config), "--launcher", "torchrun", "--num-ranks", "1"]
    process = subprocess.Popen(
        [*srun, *command, "--master-addr", "127.0.0.1"],
        cwd=ROOT,
        env=cluster.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    finished = finish(process, timeout=300)
    assert finished.code == 0, finished.output + finished.errors
    assert "0: preflight: 2 ranks on 2 nodes" in finished.output
    assert finished.output.count("launch.run: finished: ") == 1
    assert (tmp_path / "runs/tiny/DONE").is_file()


def test_a_job_that_slurm_rejects_is_reported_in_one_line(cluster: Cluster, tiny_config: Path) -> None:
    options = ["--nodes", "2", "--ranks-per-node", "1", "--time", "10", "--partition", "nowhere"]
    finished = submit(cluster, tiny_config, *options)
    assert finished.code == 1
    assert finished.errors.startswith("error: sbatch rejected the job: invalid partition specified: nowhere")
    assert finished.errors.count("\n") == 1
