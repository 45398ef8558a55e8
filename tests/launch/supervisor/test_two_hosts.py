"""Runs on two hosts: bare launchers and `launch.run`, with and without ssh; whatever dies, no process is left."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED
from launch.run_folder.checkpoints import list_checkpoints, newest_checkpoint
from launch.run_folder.observe import Progress, done_step
from tests.conftest import ROOT, Finished, finish, python, read_metrics, start
from tests.launch.helpers.requirements import require
from tests.launch.helpers.supervised import wait_for_end, wait_for_steps, wait_until
from tests.launch.supervisor.two_hosts import TwoHosts, two_hosts, why_not

SETTINGS = (
    "train.steps=100000",
    "train.global_batch_tokens=256",
    "checkpoint.every_steps=5",
    "validation.every_steps=100000",
    "monitor.every_steps=null",
)

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 15
KEEP_ALIVE = "-o ServerAliveInterval=3 -o ServerAliveCountMax=3"


@pytest.fixture(scope="module")
def pair() -> Iterator[TwoHosts]:
    """The two hosts."""
    require(why_not())
    with two_hosts() as made:
        yield made


@pytest.fixture
def hosts(pair: TwoHosts) -> Iterator[TwoHosts]:
    """The two hosts, without processes of runs before and after each test."""
    try:
        yield pair
    finally:
        pair.restore()
        pair.kill_all()


def run_command(config: Path, *arguments: str) -> list[str]:
    """Returns the command line of `launch.run`."""
    return [sys.executable, "-m", "launch.run", str(config), *SETTINGS, *arguments]


def ends(process: subprocess.Popen[str], hosts: TwoHosts, seconds: float = 240) -> Finished:
    """Waits for the end of a process, after which no process may be left on either host."""
    finished = finish(process, timeout=seconds)
    assert hosts.left() == [], finished.output + finished.errors
    return finished


def step(folder: Path) -> int:
    """Returns the last recorded step."""
    return len(read_metrics(folder)) if (folder / "metrics.jsonl").exists() else 0


def wait_for_ranks(hosts: TwoHosts, expected: tuple[int, int], process: subprocess.Popen[str]) -> None:
    """Waits until the expected number of ranks runs on each host."""
    wait_until(lambda: tuple(len(host.ranks()) for host in hosts.hosts) == expected, f"{expected} ranks", process)


def wait_for_progress(hosts: TwoHosts, folder: Path, expected: tuple[int, int], process: subprocess.Popen[str]) -> None:
    """Waits until the expected number of ranks runs on each host and has trained beyond the last checkpoint."""
    progress = Progress(folder)
    wait_for_ranks(hosts, expected, process)
    wait_until(
        lambda: progress.last_step() > newest_checkpoint(folder / "checkpoints")[0] > 0,
        "steps and a checkpoint",
        process,
    )


class Reference:
    """The losses of an uninterrupted run of one rank on one host."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def check(self, config: Path, folder: Path, relative: float) -> None:
        """Compares a run's losses with these."""
        records = read_metrics(folder)
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
        if len(records) > len(self._losses):
            stop = f"train.stop_step={max(len(records), 150)}"  # usually enough for all tests
            finished = python("train.py", config, *SETTINGS, "run.name=reference", stop)
            assert finished.code == 0, finished.errors
            self._losses = [record["loss"] for record in read_metrics(folder.parent / "reference")]
        expected = self._losses[: len(records)]
        assert [record["loss"] for record in records] == pytest.approx(expected, rel=relative)


@pytest.fixture(scope="module")
def reference() -> Reference:
    """One for all tests, since their runs have the same settings."""
    return Reference()


def test_bare_launchers_train_and_end_when_the_cable_is_cut(
    hosts: TwoHosts, tiny_config: Path, tmp_path: Path, reference: Reference
) -> None:
    """Two runs at once, under deepspeed with pdsh and under torchrun; no rank waits longer than the timeout."""
    settings = [str(tiny_config), *SETTINGS, f"deepspeed.timeout_seconds={TIMEOUT_SECONDS}"]
    variables = hosts.folder / "deepspeed_env"
    variables.write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nGLOO_SOCKET_IFNAME=eth0\n")
    deepspeed = hosts.a.start(
        ["deepspeed", "--hostfile", hosts.hostfile(), "train.py", *settings, "run.name=deepspeed"],
        {"DS_ENV_FILE": str(variables), "PDSH_SSH_ARGS_APPEND": KEEP_ALIVE},
    )
    torchrun = ["torchrun", "--nnodes=2", "--nproc_per_node=1", f"--master_addr={hosts.a.address}"]
    script = ["train.py", *settings, "run.name=torchrun"]
    nodes = [
        host.start([*torchrun, "--master_port=29700", f"--node_rank={node}", *script])
        for node, host in enumerate(hosts.hosts)
    ]
    folders = {name: tmp_path / "runs" / name for name in ("deepspeed", "torchrun")}
    wait_for_steps(deepspeed, folders["deepspeed"], 6)
    wait_for_steps(nodes[0], folders["torchrun"], 6)
    ranks = [rank for host in hosts.hosts for rank in host.ranks()]
    assert len(ranks) == 4
    hosts.cut()
    assert wait_for_end(ranks, seconds=TIMEOUT_SECONDS + 20) > TIMEOUT_SECONDS - 2
    assert finish(deepspeed, timeout=30).code != 0
    assert finish(nodes[0], timeout=60).code != 0
    hosts.restore()
    finish(nodes[1])
    assert hosts.left() == []
    for folder in folders.values():
        reference.check(tiny_config, folder, relative=1e-5)


def test_a_run_survives_killed_processes_and_a_short_cut(
    hosts: TwoHosts, tiny_config: Path, tmp_path: Path, reference: Reference
) -> None:
    """`launch.run` with deepspeed: a killed rank, a killed launcher, a flapping cable, SIGTERM; one curve."""
    folder = tmp_path / "runs/tiny"
    limits = [f"deepspeed.timeout_seconds={2 * TIMEOUT_SECONDS}", "--lost-after", str(2 * TIMEOUT_SECONDS)]
    command = run_command(tiny_config, *limits, "--hostfile", hosts.hostfile(), "--max-restarts", "2")
    process = hosts.a.start(command)
    wait_for_progress(hosts, folder, (1, 1), process)
    (rank,) = hosts.b.ranks()
    rank.kill()
    wait_for_end([*hosts.a.ranks(), rank])

    wait_for_progress(hosts, folder, (1, 1), process)
    (rank,) = hosts.b.ranks()
    launcher = rank.parent()
    assert launcher is not None and "deepspeed.launcher.launch" in launcher.cmdline()
    launcher.kill()
    wait_for_end([*hosts.a.ranks(), rank])

    wait_for_progress(hosts, folder, (1, 1), process)
    hosts.cut()
    time.sleep(4)
    before = step(folder)
    hosts.restore()
    wait_until(lambda: step(folder) > before + 2, "steps after the cable was restored", process)
    hosts.a.signal(process, signal.SIGTERM)
    finished = ends(process, hosts)
    assert finished.code == EXIT_STOPPED, finished.output + finished.errors
    assert "host-a: preflight: no problem found" in finished.output
    assert "failed: rank 1 was killed or crashed; restart 1 of 2 in 1 s" in finished.output
    assert "failed: deepspeed ended while ranks were running; restart 2 of 2 in " in finished.output
    assert finished.output.count("got SIGTERM; forwarding it to every rank") == 1
    assert finished.output.count("host-a: SIGTERM: stopping after a checkpoint") == 1
    assert list_checkpoints(folder / "checkpoints")[-1][0] == step(folder)
    reference.check(tiny_config, folder, relative=1e-4)


def test_a_lost_host_is_left_out_until_it_is_back(
    hosts: TwoHosts, tiny_config: Path, tmp_path: Path, reference: Reference
) -> None:
    """Both hosts, then without the one of rank 0, then both again, under torchrun; one batch, and one curve."""
    folder = tmp_path / "runs/tiny"
    limits = [f"deepspeed.timeout_seconds={TIMEOUT_SECONDS}", "--lost-after", str(TIMEOUT_SECONDS)]
    hostfile = hosts.hostfile(b_first=True)
    options = ["--launcher", "torchrun", "--no-check", "--hostfile", hostfile, "--max-restarts", "2"]
    process = hosts.a.start(run_command(tiny_config, *limits, "train.stop_step=100", *options))
    wait_for_progress(hosts, folder, (1, 1), process)
    hosts.cut()
    ranks = [rank for host in hosts.hosts for rank in host.ranks()]
    wait_for_end(ranks, seconds=TIMEOUT_SECONDS + 10)
    wait_until(lambda: hosts.b.processes() == [], "an empty host", process)

    wait_for_progress(hosts, folder, (1, 0), process)
    hosts.restore()
    (rank,) = hosts.a.ranks()
    rank.kill()
    wait_for_ranks(hosts, (1, 1), process)
    finished = ends(process, hosts)
    assert finished.code == EXIT_DONE, finished.output + finished.errors
    assert "failed: lost host-b: no answer for 15 s; restart 1 of 2 in " in finished.output
    assert "continuing without host-b: cannot be reached through ssh: " in finished.output
    assert "host-b is back" in finished.output
    assert "lost host-a" not in finished.output
    assert "2 accumulation steps" in finished.output and "4 accumulation steps" in finished.output
    assert done_step(folder) == 100
    reference.check(tiny_config, folder, relative=1e-4)


def test_no_process_outlives_a_killed_coordinator(hosts: TwoHosts, tiny_config: Path, tmp_path: Path) -> None:
    """As on a single node, every recorded step is saved."""
    folder = tmp_path / "runs/tiny"
    options = ["--launcher", "torchrun", "--no-check", "--hostfile", hosts.hostfile()]
    process = hosts.a.start(run_command(tiny_config, *options))
    wait_for_progress(hosts, folder, (1, 1), process)
    hosts.a.signal(process, signal.SIGKILL)
    finish(process, timeout=60)
    wait_until(lambda: hosts.left() == [], "empty hosts")
    assert list_checkpoints(folder / "checkpoints")[-1][0] == step(folder)


def test_a_second_sigint_ends_all_ranks_on_all_hosts(hosts: TwoHosts, tiny_config: Path, tmp_path: Path) -> None:
    """With two ranks per host, of which one is suspended, so that no checkpoint can complete."""
    options = ["--launcher", "torchrun", "--no-check", "--hostfile", hosts.hostfile(slots=2), "--max-restarts", "3"]
    process = hosts.a.start(run_command(tiny_config, *options))
    wait_for_ranks(hosts, (2, 2), process)
    wait_for_steps(process, tmp_path / "runs/tiny", 3)
    hosts.b.ranks()[0].suspend()
    hosts.a.signal(process, signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    begin = time.monotonic()
    hosts.a.signal(process, signal.SIGINT)
    finished = ends(process, hosts, seconds=60)
    assert time.monotonic() - begin < 15
    assert finished.code == EXIT_FAILURE
    assert finished.errors.splitlines()[-1] == "error: interrupted; the run can continue from its last checkpoint"
    assert "lost host" not in finished.output


def test_every_node_calls_the_command(hosts: TwoHosts, tiny_config: Path, tmp_path: Path) -> None:
    """Without ssh, as srun would start and signal it: one request, the same exit code everywhere."""
    folder = tmp_path / "runs/tiny"
    options = ["--launcher", "torchrun", "--nodes", "2", "--master-addr", hosts.a.address, "--master-port", "29600"]
    command = run_command(tiny_config, *options)
    processes = [host.start([*command, "--node-rank", str(node)]) for node, host in enumerate(hosts.hosts)]
    wait_for_progress(hosts, folder, (1, 1), processes[0])
    for host, process in zip(hosts.hosts, processes, strict=True):
        host.signal(process, signal.SIGUSR1)
    finished = [finish(process, timeout=120) for process in processes]
    assert hosts.left() == []
    assert [one.code for one in finished] == [EXIT_STOPPED] * 2, finished
    assert "preflight: 2 ranks on 2 nodes (host-a, host-b), CPU" in finished[0].output
    assert finished[0].output.count("got SIGUSR1") == 1
    assert list_checkpoints(folder / "checkpoints")[-1][0] == step(folder)


def test_problems_before_a_run_are_one_line_each(hosts: TwoHosts, tiny_config: Path, tmp_path: Path) -> None:
    """A host that does not answer, one with two names, different source code, a port in use: one line each."""
    more = hosts.hostfile(more="host-c slots=1\n")
    finished = ends(hosts.a.start(run_command(tiny_config, "--hostfile", more)), hosts)
    assert finished.code == EXIT_FAILURE
    (line,) = finished.errors.splitlines()
    assert line.startswith("error: host-c: cannot be reached through ssh: ssh: connect to host host-c port 2222: ")
    assert "check that `ssh -o BatchMode=yes host-c true` works" in line

    twice = hosts.hostfile(more=f"{hosts.b.address} slots=1\n")
    finished = ends(hosts.a.start(run_command(tiny_config, "--hostfile", twice)), hosts)
    assert finished.code == EXIT_FAILURE
    (line,) = finished.errors.splitlines()
    assert line.endswith("; remove one of them from the hostfile")
    assert ": is the same host (host-b) as " in line and "host-b" in line and hosts.b.address in line

    other = hosts.folder / "schedule.py"
    other.write_text((ROOT / "launch/optim/schedule.py").read_text() + "# changed\n")
    mounted = hosts.b.start(["mount", "--bind", str(other), str(ROOT / "launch/optim/schedule.py")])
    assert finish(mounted).code == 0
    try:
        finished = ends(hosts.a.start(run_command(tiny_config, "--hostfile", hosts.hostfile(), "--check")), hosts)
    finally:
        assert finish(hosts.b.start(["umount", str(ROOT / "launch/optim/schedule.py")])).code == 0
    assert finished.code == EXIT_FAILURE
    problems = [line for line in finished.output.splitlines() if "error:" in line]
    assert problems == [
        "host-a: error: node 1 (host-b): different source code than node 0 (host-a): launch/optim/schedule.py; check "
        "out the same revision"
    ]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        options = ["--nodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
        finished = finish(start(run_command(tiny_config, *options)))
    assert finished.code == EXIT_FAILURE
    problem = f"--master-port {port}: cannot listen: Address already in use; stop the process that uses it, or choose"
    assert finished.errors == f"error: {problem} another port\n"
    assert not (tmp_path / "runs/tiny").exists()
