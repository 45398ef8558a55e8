"""A real SLURM cluster of two nodes on one machine: munged, slurmctld and two slurmd on loopback, with own files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2")
START_SECONDS = 20.0

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=15
KillWait=5
JobRequeue=1
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def why_not() -> str | None:
    """Returns why no cluster can be started here; None if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"SLURM is not installed ({', '.join(missing)} missing); Debian's packages are slurm-wlm and munge"
    return "SLURM's daemons need root here" if os.geteuid() != 0 else None


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        environ: The environment of processes that use it.
        folder: The folder of its files.
    """

    environ: dict[str, str]
    folder: Path

    def run(self, *command: str) -> str:
        """Runs one of SLURM's commands and returns its output. Raises AssertionError when it fails."""
        finished = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=False)
        assert finished.returncode == 0, f"{command}: {finished.stdout}{finished.stderr}"
        return finished.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Returns the job's fields, see `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def has_left(self, job_id: str) -> bool:
        """Whether the script of one start of a job has ended, according to its node's log."""
        return any(f"[{job_id}.batch] done with job" in log.read_text() for log in self.folder.glob("slurmd.*.log"))

    def explain(self, job_id: str) -> str:
        """Returns the daemons' log lines about a job, and its state."""
        logs = [path.read_text() for path in sorted(self.folder.glob("*.log"))]
        lines = [line for log in logs for line in log.splitlines() if re.search(rf"(JobId=|job |\[){job_id}\b", line)]
        return "\n".join([*sorted(lines), str(self.job(job_id))])


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Starts the cluster, and stops it together with its jobs."""
    # A socket's path must be short, and munged requires a folder that no other user can write to.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    environ = {**environment(), "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    pid_files = [folder / "munge.pid", folder / "slurmctld.pid", *(folder / f"slurmd.{node}.pid" for node in NODES)]
    cluster = Cluster(environ, folder)
    try:
        _start_daemons(folder, environ)
        _wait_for_nodes(cluster, folder)
        yield cluster
        cluster.run("scancel", "--state=RUNNING", "--signal=KILL", "--full", "--user=root")
    finally:
        _end(pid_files)
        shutil.rmtree(folder, ignore_errors=True)


def _start_daemons(folder: Path, environ: dict[str, str]) -> None:
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=500"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    text = _CONFIGURATION.format(host=host, folder=folder, controller_port=ports[0], nodes=nodes)
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munge = [f"--{option}={folder}/munge.{end}" for option, end in (("key-file", "key"), ("socket", "sock"))]
    munge += [f"--{option}={folder}/munge.{end}" for option, end in (("pid-file", "pid"), ("log-file", "log"))]
    _start(["munged", "--force", *munge, f"--seed-file={folder}/munge.seed"], environ)
    (folder / "state").mkdir()
    _start(["slurmctld"], environ)
    for node in NODES:
        _start(["slurmd", "-N", node], environ)


def _start(command: Sequence[str], environ: dict[str, str]) -> None:
    """Starts a daemon, which puts itself into the background."""
    finished = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
    )
    assert finished.returncode == 0, f"{command}: {finished.stdout}{finished.stderr}"


def _wait_for_nodes(cluster: Cluster, folder: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while (states := cluster.run("sinfo", "--noheader", "--Node", "--format=%T").split()) != ["idle"] * len(NODES):
        assert time.monotonic() < end, f"the nodes are {states}: {(folder / 'slurmctld.log').read_text()[-2000:]}"
        time.sleep(0.1)


def _end(pid_files: Sequence[Path]) -> None:
    """Terminates the daemons and waits for them."""
    daemons = []
    for path in pid_files:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            daemons.append(psutil.Process(int(path.read_text())))
    for daemon in daemons:
        daemon.terminate()
    for daemon in psutil.wait_procs(daemons, timeout=10)[1]:
        daemon.kill()


def _path() -> str:
    """Returns a PATH with the daemons' folder, which is not on a normal user's PATH in Debian."""
    return f"{environment()['PATH']}:/usr/sbin:/usr/local/sbin"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
