"""Runs on several nodes: hostfiles, options, messages, requests and reports; workers and the coordinator."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from launch.distributed.topology import detect_topology
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE, RunError
from launch.process.rank_status import RankOutcome
from launch.run import parse_arguments
from launch.supervisor.attempt import POLL_SECONDS, SPAWN, Launch, Place, Report
from launch.supervisor.coordinator import Coordinator, is_failure
from launch.supervisor.hostfile import Host, parse_hostfile, read_hostfile
from launch.supervisor.node_link import LineReader, Link, encode
from launch.supervisor.node_options import NodeChoice, choose_nodes, first_of_nodelist
from launch.supervisor.node_transport import (
    WorkerConnection,
    forwarded_variables,
    parse_environment,
    socket_link,
    ssh_command,
)
from launch.supervisor.requests import Requests
from launch.supervisor.spawn import rank_environment
from launch.supervisor.worker import Worker
from tests.conftest import ROOT, python

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@given(
    st.lists(NAMES, min_size=1, max_size=6, unique=True),
    st.integers(1, 99_999),
    st.sampled_from(["", "  ", "# slots=3", "\t# x"]),
)
def test_hostfiles_are_read_back(names: list[str], slots: int, between: str) -> None:
    text = f"\n{between}\n".join(f" {name}  slots={slots} {between}" for name in names)
    assert parse_hostfile(text, "hosts") == [Host(name, slots) for name in names]


@given(st.text(max_size=200))
def test_any_hostfile_is_read_or_explained(text: str) -> None:
    try:
        hosts = parse_hostfile(text, "hosts")
    except ConfigError as error:
        hosts, problems = [], list(error.problems)
    else:
        problems = []
    assert all(problem.startswith("hosts:") and "\n" not in problem for problem in problems)
    assert bool(hosts) != bool(problems)
    assert len({host.name for host in hosts}) == len(hosts) and len({host.slots for host in hosts}) <= 1


def test_all_problems_of_a_hostfile_are_reported(tmp_path: Path) -> None:
    text = "a slots=2\nb slots=4\na slots=2\nc\n-oProxyCommand=x slots=2\n"
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts")
    assert list(caught.value.problems) == [
        "hosts:3: a is already in line 1; remove one of them",
        "hosts:4: 'c' is not `NAME slots=N`, e.g. `gpu-node-1 slots=8`",
        "hosts:5: '-oProxyCommand=x slots=2' is not `NAME slots=N`, e.g. `gpu-node-1 slots=8`",
        "hosts:2: b has 4 slots and a has 2; every host must have the same number of ranks",
    ]
    with pytest.raises(ConfigError, match="has no hosts"):
        parse_hostfile("\n# nobody\n", "hosts")
    with pytest.raises(ConfigError, match=r"--hostfile .*: cannot be read: No such file or directory"):
        read_hostfile(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"--hostfile .*: cannot be read: Is a directory"):
        read_hostfile(str(tmp_path))


def test_hostfiles_of_other_systems(tmp_path: Path) -> None:
    """With Windows' line ends and byte-order mark; and files that are not text."""
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa slots=2\r\n2001:db8::1\tslots=2\r\n")
    assert read_hostfile(str(path)) == [Host("a", 2), Host("2001:db8::1", 2)]
    path.write_bytes(b"\xff\x00\x80")
    with pytest.raises(ConfigError, match=r"--hostfile .*: cannot be read: it is not UTF-8 text"):
        read_hostfile(str(path))
    path.write_bytes(bytes(100_000))
    with pytest.raises(ConfigError) as caught:
        read_hostfile(str(path))
    assert len(str(caught.value)) < 500


MESSAGES = st.lists(
    st.fixed_dictionaries({"kind": st.text(max_size=5), "line": st.text(), "number": st.integers()}), max_size=5
)


NOISE = st.sampled_from([b"", b"Welcome!\n", b'{"a": 1}\n', b"[]\n"])


@given(MESSAGES, st.lists(st.integers(0, 300), max_size=8), NOISE)
def test_messages_arrive_however_the_stream_is_cut(messages: list[Any], cuts: list[int], noise: bytes) -> None:
    stream = b"".join(noise + encode(message) for message in messages)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = LineReader()
    found = [message for begin, end in itertools.pairwise(edges) for message in reader.feed(stream[begin:end])]
    assert found == messages
    assert reader.last_unparsed == (noise.decode().strip() if messages else "")


def test_a_signal_to_several_nodes_is_one_request() -> None:
    lines: list[str] = []
    requests = Requests(lines.append)
    for source in ("", "b", "c"):
        requests.add(signal.SIGUSR1, source)
    assert requests == [signal.SIGUSR1]
    requests.add(signal.SIGINT, "b")
    requests.add(signal.SIGINT)
    assert requests == [signal.SIGUSR1, signal.SIGINT] and not requests.must_kill
    requests.add(signal.SIGINT)
    assert requests == [signal.SIGUSR1, signal.SIGINT, signal.SIGINT] and requests.must_kill
    assert lines == [
        "got SIGUSR1; forwarding it to every rank",
        "got SIGINT on b; forwarding it to every rank",
        "got SIGINT; killing all ranks",
    ]


def options(*arguments: str) -> argparse.Namespace:
    return parse_arguments(["a.yaml", *arguments])


SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[007-010]",
    "SLURM_JOB_ID": "12345",
}


def test_nodes_come_from_options_a_hostfile_or_srun(tmp_path: Path) -> None:
    assert choose_nodes(options(), {}) == NodeChoice()
    assert choose_nodes(options(), {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}) == NodeChoice()
    given_ones = options("--nodes", "3", "--node-rank", "2", "--master-addr", "a", "--master-port", "1234")
    assert choose_nodes(given_ones, {}) == NodeChoice((), 3, 2, "a", 1234)
    assert choose_nodes(options(), SRUN) == NodeChoice((), 4, 2, "gpu007", 20345)
    assert choose_nodes(options(), {**SRUN, "MASTER_ADDR": "10.0.0.7"}).master_addr == "10.0.0.7"
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=2\n")
    assert choose_nodes(options("--hostfile", str(path)), SRUN) == NodeChoice((Host("a", 2), Host("b", 2)))
    for text, first in (("n1", "n1"), ("n[1-2]", "n1"), ("gpu[003-010,12],cpu1", "gpu003"), ("a,b", "a"), ("", "")):
        assert first_of_nodelist(text) == first


@pytest.mark.parametrize(
    ("arguments", "environ", "problems"),
    [
        (["--nodes", "2"], {}, ["--nodes 2: needs --node-rank", "--nodes 2: needs --master-addr"]),
        (["--nodes", "2", "--node-rank", "2", "--master-addr", "a"], {}, ["--node-rank 2: expected 0 to 1"]),
        (["--nodes", "0"], {}, ["--nodes 0: expected at least 1"]),
        (["--node-rank", "1", "--master-addr", "a"], {}, ["--node-rank 1: needs --nodes", "--master-addr a: needs"]),
        (["--launcher", "python", "--nodes", "2", "--node-rank", "0", "--master-addr", "a"], {}, ["--launcher python"]),
        (
            ["--hostfile", "/nowhere", "--nodes", "2"],
            {},
            ["--nodes 2: cannot be combined", "--hostfile /nowhere: cannot"],
        ),
        (["--nodes", "2", "--node-rank", "1"], SRUN, ["--nodes 2 contradicts srun", "--node-rank 1 contradicts srun"]),
        ([], {**SRUN, "SLURM_STEP_NUM_TASKS": "8"}, ["SLURM_STEP_NUM_TASKS=8 on SLURM_STEP_NUM_NODES=4 nodes"]),
        ([], {**SRUN, "SLURM_NODEID": "x"}, ["SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_NODEID"]),
        (["--lost-after", "1"], {}, ["--lost-after 1: expected 5 to 86400 seconds"]),
        (["--lost-after", "nan"], {}, ["--lost-after nan: expected 5 to 86400 seconds"]),
        (["--lost-after", "inf"], {}, ["--lost-after inf: expected 5 to 86400 seconds"]),
        (["--nodes", "1", "--master-port", "70000"], {}, ["--master-port 70000: not a port"]),
    ],
)
def test_contradictions_are_reported(arguments: list[str], environ: Mapping[str, str], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_nodes(options(*arguments), environ)
    assert len(caught.value.problems) == len(problems)
    for found, begin in zip(caught.value.problems, problems, strict=True):
        assert found.startswith(begin)


def test_variables_for_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_environment("A=1\n\n# x\n B=two words=3 \n", "f") == {"A": "1", "B": "two words=3"}
    with pytest.raises(RunError, match=r"f:2: 'B' is not NAME=VALUE"):
        parse_environment("A=1\nB\n", "f")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".deepspeed_env").write_bytes(b"NCCL_DEBUG=WARN\nMINE=\xff\n")
    environ = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "AWS_SECRET": "x", "PYTHONPATH": "/lib"}
    expected = {
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "3",
        "MINE": os.fsdecode(b"\xff"),
        "PYTHONPATH": f"{ROOT}:/lib",
    }
    assert forwarded_variables(environ) == expected


def test_a_remote_shell_sees_the_folder_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    *ssh, command = ssh_command("host", 3, 60)
    assert ssh[-2:] == ["--", "host"] and "ServerAliveInterval=20" in ssh
    shown = command.replace(f"{sys.executable} -m launch.node_agent 3 60", "bash -c 'pwd; echo $PYTHONPATH'")
    output = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[0] == str(folder) and output.splitlines()[1].startswith(str(ROOT))


def test_launches_and_reports_travel_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launch = Launch("deepspeed", 2, ("a.yaml", "k=v"), place=Place(1, 3, "10.0.0.1", 1234))
    assert Launch.from_json(json.loads(json.dumps(launch.to_json()))) == launch
    report = Report("torchrun", (2, 3), {2: RankOutcome(1, "why"), 3: RankOutcome(0)}, True, None, "x")
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report

    command = launch.command(tmp_path)
    assert (tmp_path / "hostfile").read_text() == "node-0 slots=2\nnode-1 slots=2\nnode-2 slots=2\n"
    assert command[1:5] == ["--master_addr", "10.0.0.1", "--master_port", "1234"]
    assert command[-6:-3] == ["--no_ssh", "--node_rank", "1"]
    command = Launch("torchrun", 2, ("a.yaml",), place=launch.place).command(tmp_path)
    assert command[1:7] == ["--nnodes", "3", "--node_rank", "1", "--nproc_per_node", "2"]

    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,7")
    command = launch.command(tmp_path)
    assert (tmp_path / "hostfile").read_text() == "node-0 slots=2\nnode-1 slots=6\nnode-2 slots=2\n"
    assert command[-5:-3] == ["--include", "node-0@node-1:5,2@node-2"]


def test_ranks_of_the_preflight_know_their_place() -> None:
    environ = {**rank_environment(SRUN, 2, 1, 3, 1), "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    topology = detect_topology(environ)
    assert (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size) == (3, 6, 1, 2)
    assert topology.node == 1
    code = "import os, sys; sys.exit(7 * int(os.environ['RANK']))"
    assert python("-m", "launch.supervisor.spawn", "2", "0", "1", "127.0.0.1", "1", "-c", code).code == 7


def test_reports_of_all_nodes_become_one() -> None:
    good = Report("torchrun", (0,), {0: RankOutcome(EXIT_DONE)}, launcher_code=0)
    stopped = Report("torchrun", (0,), {0: RankOutcome(EXIT_STOPPED)}, launcher_code=1)
    failed = Report("torchrun", (1,), {1: RankOutcome(1, "the disk is full")})
    silent = Report("torchrun", (1,), {})
    assert [is_failure(report, 1) for report in (good, stopped, failed, silent)] == [False, False, True, True]
    assert is_failure(good, 2)
    assert Report.merge([good, failed]).failure() == "rank 1: the disk is full"
    assert Report.merge([good, silent]).failure() == "rank 1 was killed or crashed"
    lost = Report.merge([stopped], "lost b: no answer for 60 s")
    assert lost.failure() == "lost b: no answer for 60 s"
    assert lost.lost_launcher  # so that a checkpoint saved then does not count as a requested stop


class FakeCoordinator:
    """A coordinator that a test plays, and a real worker in a thread."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self.link: Link = socket_link(here)
        self.requests = Requests()
        worker = Worker(socket_link(there), 1, 60, self.requests, own_output=True)
        self.codes: list[int | None] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(worker.serve()))
        self.thread.start()

    def wait_for(self, kind: str) -> dict[str, Any]:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for message in self.link.receive():
                if message["kind"] == kind:
                    return message
            time.sleep(0.01)
        raise AssertionError(f"no {kind}")

    def start(self, launch: Launch) -> None:
        self.link.send("start", launch=launch.to_json())


def server_launch() -> Launch:
    """Returns the launch of a rank that does not end by itself."""
    return Launch(SPAWN, 1, ("--bind", "127.0.0.1", "0"), "http.server", Place(0, 1, "127.0.0.1", 1))


def test_a_worker_follows_the_coordinator() -> None:
    """A missing launcher, a rank that fails, one that is killed, and leaving; requests reach the coordinator."""
    coordinator = FakeCoordinator()
    hello = coordinator.wait_for("hello")
    assert hello["node"] == 1 and hello["host"] == socket.gethostname()
    coordinator.link.send("setup", environ={})
    time.sleep(3 * POLL_SECONDS)
    coordinator.requests.add(signal.SIGUSR1)
    assert coordinator.wait_for("request")["number"] == signal.SIGUSR1
    coordinator.start(Launch("nowhere", 1, ()))
    assert coordinator.wait_for("ended")["report"]["fault"].startswith("--launcher nowhere: no such program")
    coordinator.start(Launch(SPAWN, 1, (), "launch.nowhere", Place(0, 1, "127.0.0.1", 1)))
    report = coordinator.wait_for("ended")["report"]
    assert (report["launcher_code"], report["outcomes"]) == (1, {})
    coordinator.start(server_launch())
    assert coordinator.wait_for("event")["line"].startswith("started spawn")
    coordinator.link.send("end")
    assert coordinator.wait_for("ended")["report"]["launcher_code"] is None
    coordinator.link.send("end")  # too late: it must not end the next attempt or the worker
    time.sleep(3 * POLL_SECONDS)
    coordinator.start(server_launch())
    assert coordinator.wait_for("event")["line"].startswith("started spawn")
    coordinator.link.send("signal", number=signal.SIGTERM)
    coordinator.wait_for("ended")
    coordinator.link.send("leave", code=EXIT_STOPPED)
    coordinator.thread.join(30)
    assert coordinator.codes == [EXIT_STOPPED]


@pytest.mark.parametrize("more", [{"kind": "signal", "number": signal.SIGTERM}, {"kind": "end"}])
def test_messages_received_with_a_start_apply_to_it(more: dict[str, Any]) -> None:
    """A worker may receive both at once; this rank would not end by itself."""
    here, there = socket.socketpair()
    here.sendall(encode({"kind": "start", "launch": server_launch().to_json()}) + encode(more))
    worker = Worker(socket_link(there), 0, 5, Requests(), own_output=True)
    coordinator = socket_link(here)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    end, kinds = time.monotonic() + 20, [""]
    while "ended" not in kinds and time.monotonic() < end:
        kinds += [message["kind"] for message in coordinator.receive()]
        time.sleep(0.01)
    coordinator.send("leave", code=0)
    thread.join(30)
    assert "ended" in kinds


def test_a_worker_leaves_when_the_coordinator_has_ended() -> None:
    coordinator = FakeCoordinator()
    coordinator.link.close()
    coordinator.thread.join(30)
    assert coordinator.codes == [None]


def test_a_worker_ends_its_ranks_when_the_coordinator_is_silent() -> None:
    """The coordinator sends a start, and then not even heartbeats."""
    here, there = socket.socketpair()
    worker = Worker(socket_link(there), 0, 4, Requests(), own_output=True)
    here.sendall(encode({"kind": "start", "launch": server_launch().to_json()}))
    begin = time.monotonic()
    assert worker.serve() is None
    assert 4 <= time.monotonic() - begin < 30
    heard = LineReader().feed(here.recv(1 << 16))
    (ended,) = [message for message in heard if message["kind"] == "ended"]
    assert ended["report"]["launcher_code"] is None
    here.close()


class Wires:
    """A transport to workers in threads of this process, which were started with these arguments."""

    variables: Mapping[str, str] = {}

    def __init__(self, *arguments: Sequence[str], limit_seconds: float = 60, listens: bool = False) -> None:
        self.limit_seconds, self.listens = limit_seconds, listens
        self.calling: list[socket.socket] = []
        self.arguments = arguments
        self.workers: list[Worker] = []
        self.codes: dict[int, int | None] = {}
        self.threads: list[threading.Thread] = []

    def start(self, missing: Sequence[int]) -> list[WorkerConnection]:
        return [self._start(node) for node in missing]

    def call(self, node: int) -> None:
        """Starts a worker that connects by itself."""
        here, there = socket.socketpair()
        self.calling.append(here)
        self._serve(node, there)

    def accept(self) -> list[WorkerConnection]:
        lines = [WorkerConnection(socket_link(here)) for here in self.calling]
        self.calling.clear()
        return lines

    def describe_failure(self, node: int, last_output: str) -> str:
        return f"node {node} did not connect"

    def close(self) -> None:
        for thread in self.threads:
            thread.join(30)

    def _start(self, node: int) -> WorkerConnection:
        here, there = socket.socketpair()
        self._serve(node, there)
        return WorkerConnection(socket_link(here), node)

    def _serve(self, node: int, there: socket.socket) -> None:
        link, arguments = socket_link(there), self.arguments[node]
        self.requests = Requests()  # of the latest worker
        worker = Worker(link, node, self.limit_seconds, self.requests, own_output=True, arguments=arguments)
        self.workers.append(worker)
        self.threads.append(threading.Thread(target=lambda: self.codes.update({node: worker.serve()})))
        self.threads[-1].start()


def test_refused_nodes_are_told_why() -> None:
    """Two names of one host, and arguments that differ from node 0's."""
    wires = Wires([], [])
    nodes = Coordinator(["a", "b"], wires, 60, Requests(), print)
    (problem,) = nodes.wait_for_nodes(30)
    nodes.shut_down(EXIT_FAILURE)
    host, both = socket.gethostname(), {"a", "b"}
    (present,) = both - {problem[0]}
    assert problem == f"{problem[0]}: is the same host ({host}) as {present}; remove one of them from the hostfile"
    assert sorted(worker.reason for worker in wires.workers) == ["", problem]
    assert sorted(wires.codes.values(), key=str) == [EXIT_FAILURE, EXIT_USAGE]

    ours = ["x.yaml", "a=1", "--num-ranks 8"]
    wires = Wires(ours, ["x.yaml", "a=1", "--num-ranks 4"], ["x.yaml", "b=2", *ours[1:]], [*ours[1:], ours[0]])
    lines: list[str] = []
    nodes = Coordinator([""] * 4, wires, 60, Requests(), lines.append, wires.arguments[0])
    problems = nodes.wait_for_nodes(30)
    nodes.shut_down(EXIT_FAILURE)
    begins = [f"{host}: node 1 has --num-ranks 4 where node 0 has --num-ranks 8; use the same command on all"]
    begins += [f"{host}: node 2 has b=2 where node 0 has nothing; use the same command on all"]
    begins += [f"{host}: node 3 has its arguments in another order; use the same command on all"]
    for problem, begin in zip(problems, begins, strict=True):
        assert problem.startswith(begin)
    assert lines == []  # each is printed once, by the caller

    here, there = socket.socketpair()
    there.sendall(encode({"kind": "hello", "node": 0}))
    wires = Wires()
    wires.start = lambda missing: [WorkerConnection(socket_link(here), 0)]  # type: ignore[method-assign]
    (problem,) = Coordinator(["a"], wires, 60, Requests(), print).wait_for_nodes(30)
    assert problem == "a: its worker runs another revision of the project; bring it to the same one"


def test_killing_an_attempt_loses_no_node() -> None:
    lines: list[str] = []
    nodes = Coordinator(["", ""], Wires([], []), 60, Requests(), lines.append)
    assert nodes.wait_for_nodes(30) == []
    for _ in range(2):
        attempt = nodes.start(server_launch())
        end = time.monotonic() + 30
        while sum("started spawn" in line for line in lines) < 2 and time.monotonic() < end:
            nodes.poll()
            time.sleep(0.01)
        attempt.kill()
        assert attempt.close().fault == ""
        time.sleep(3 * POLL_SECONDS)
        assert nodes.poll() == []
        assert len(lines) == 2 and all("started spawn" in line for line in lines)
        lines.clear()
    nodes.shut_down(EXIT_DONE)


def test_a_worker_that_connects_during_an_attempt_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for longer than its limit of silence; one that still waits at the end is dismissed like the others."""
    lines: list[str] = []
    wires = Wires([], [], [], limit_seconds=3, listens=True)
    monkeypatch.setattr(wires, "start", lambda missing: [])
    nodes = Coordinator(["", ""], wires, 60, Requests(), lines.append)
    wires.call(0)
    assert nodes.wait_for_nodes(2) == ["node 1 did not connect"]
    wires.call(1)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        nodes.poll()
        time.sleep(POLL_SECONDS)
    assert wires.codes == {}
    nodes.recover_lost_nodes()
    assert [node.number for node in nodes.present] == [0, 1] and lines[-1].endswith(" is back")
    wires.call(2)
    nodes.poll()
    wires.requests.add(signal.SIGTERM)  # a worker that waits may leave at once
    wires.threads[-1].join(10)
    assert wires.codes == {2: None}
    wires.call(2)
    nodes.poll()
    nodes.shut_down(EXIT_DONE)
    assert wires.codes == {0: EXIT_DONE, 1: EXIT_DONE, 2: EXIT_DONE}
