"""The preflight names every difference between nodes, here ranks with their own working copies and configurations."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.load import load_config
from data.source import TokenSource
from launch.distributed.topology import free_port
from launch.errors import RunError
from launch.planning.memory import model_sizes, plan_memory
from launch.preflight_checks.checks import can_communicate, find_problems, find_reported_problems
from launch.preflight_checks.facts import Need, RankFacts, describe_source
from tests.conftest import ROOT, Finished, environment, finish, launcher_command, python, start, write_shard
from tests.data.test_source import write_manifest

HOST = socket.gethostname()


@dataclass(frozen=True)
class Node:
    """A node of one rank: a working directory with the project's code."""

    folder: Path

    def write(self, config: dict[str, Any], seed: int = 1) -> None:
        """Writes the node's configuration, and data that depends on the seed."""
        (self.folder / "run.yaml").write_text(yaml.safe_dump(config))
        (self.folder / "shards").mkdir()
        write_shard(self.folder / "shards/train", seed)

    def fake(self, code: str) -> None:
        """Installs code that runs before the preflight."""
        (self.folder / "edge").mkdir(exist_ok=True)
        (self.folder / "edge/sitecustomize.py").write_text(code)

    def fake_version(self, package: str, version: str) -> None:
        folder = self.folder / f"edge/{package}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.fixture
def nodes(tmp_path: Path) -> list[Node]:
    """Three nodes with the same code, and with one shared folder `runs`."""
    made = []
    for number in range(3):
        folder = tmp_path / f"node_{number}"
        folder.mkdir()
        for name in ("configs", "data", "launch", "model", "train.py"):
            (folder / name).symlink_to(ROOT / name)
        made.append(Node(folder))
    (tmp_path / "node_0/runs").mkdir()
    for node in made[1:]:
        (node.folder / "runs").symlink_to(tmp_path / "node_0/runs")
    return made


@pytest.fixture
def config(tiny_config: Path) -> dict[str, Any]:
    """A configuration with paths relative to a node's folder."""
    tree: dict[str, Any] = yaml.safe_load(tiny_config.read_text())
    tree["run"]["dir"] = "runs"
    tree["data"] = {"sources": [{"path": "shards/train"}]}
    return tree


def start_rank(
    node: Node, rank: int, world_size: int, port: int, arguments: Sequence[str] = (), **variables: str
) -> subprocess.Popen[str]:
    topology = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-m", "launch.preflight", "run.yaml", *arguments],
        cwd=node.folder,
        env={**environment(), **topology, **address, **variables, "PYTHONPATH": str(node.folder / "edge")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def preflight(nodes: Sequence[Node], **variables: str) -> list[Finished]:
    port = free_port()
    return [
        finish(one)
        for one in [start_rank(node, rank, len(nodes), port, **variables) for rank, node in enumerate(nodes)]
    ]


def test_identical_nodes_pass_and_leave_no_files(nodes: list[Node], config: dict[str, Any]) -> None:
    for node in nodes[:2]:
        node.write(config)
    ended = preflight(nodes[:2])
    assert [one.code for one in ended] == [0, 0], ended
    assert ended[0].errors == ended[1].errors == ended[1].output == ""
    lines = ended[0].output.splitlines()
    assert lines[0] == f"preflight: 2 ranks on 2 nodes ({HOST}), CPU"
    assert lines[1].startswith("preflight: all-reduce of 4 MB: ") and lines[1].endswith(" GB/s")
    assert lines[-1].startswith("preflight: no problem found in ")
    assert list((nodes[0].folder / "runs").iterdir()) == []


def test_one_node_differs_in_everything(nodes: list[Node], config: dict[str, Any]) -> None:
    """All lines at once, each with the node and the remedy."""
    for node in nodes[:2]:
        node.write(config)
    odd = nodes[2]
    odd.write({**config, "optim": {"lr": 0.1, "warmup_steps": 2}}, seed=3)
    for name in ("launch", "runs"):
        (odd.folder / name).unlink()
    shutil.copytree(ROOT / "launch", odd.folder / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    with (odd.folder / "launch/planning/plan.py").open("a") as stream:
        stream.write("# local change\n")
    (odd.folder / "launch/mine.py").touch()
    odd.fake_version("numpy", "9.9.9")
    odd.fake(
        "import time, collections\n"
        "now = time.time\n"
        "time.time = lambda: now() + 100\n"
        "import psutil\n"
        "psutil.virtual_memory = lambda: collections.namedtuple('Memory', 'available')(100_000)\n"
    )
    first, _, third = preflight(nodes)
    assert first.code == third.code == 1
    assert third.errors == first.output == ""
    there = f"error: node 2 ({HOST}): "
    planned = load_config(odd.folder / "run.yaml")
    need = plan_memory(model_sizes(planned), planned, 1, len(nodes), on_gpu=False).peak
    versions = [line for line in first.errors.splitlines() if " versions " in line]
    assert versions[0].startswith(there + f"different versions than node 0 ({HOST}): numpy 9.9.9 instead of ")
    assert versions[0].endswith("; install the same ones (bash launch/setup.sh)")
    assert [line for line in first.errors.splitlines() if line not in versions] == [
        there + f"different source code than node 0 ({HOST}): launch/mine.py, launch/planning/plan.py; check out the "
        "same revision",
        there + f"different configuration than node 0 ({HOST}): optim.lr is 0.1 instead of 0.005; use the same file "
        "and arguments",
        there + f"different data than node 0 ({HOST}): data.sources.0 (by manifest, or file sizes and samples); copy "
        "it again",
        there
        + f"0.0001 GB of memory are free, but the run needs about {need / 1e9:.3g} GB; stop what else uses it, or "
        "set a higher deepspeed.zero_stage, train.activation_checkpointing or a lower train.micro_batch_size",
        there + "its clock is 100 s ahead of the others'; synchronise it (chronyd or systemd-timesyncd)",
        there + f"run.dir: runs is not the folder that node 0 ({HOST}) has at that path; mount the same one on "
        "every node, or use its absolute path",
    ]


def test_problems_of_a_single_node_are_reported(nodes: list[Node], config: dict[str, Any]) -> None:
    """A full disk with a file in place of the folder, missing data, an invalid configuration, and no network."""
    nodes[0].write({**config, "run": {"dir": "run.yaml/runs", "name": "tiny"}})
    nodes[0].fake(
        "import shutil, collections\n"
        "shutil.disk_usage = lambda path: collections.namedtuple('Usage', 'free')(1_000_000)\n"
    )
    nodes[1].write({**config, "run": {"dir": "run.yaml/runs", "name": "tiny"}})
    shutil.rmtree(nodes[1].folder / "shards")
    nodes[2].write({**config, "optim": {"lrr": 0.1}})
    first, *_ = preflight(nodes, GLOO_SOCKET_IFNAME="nowhere")
    assert first.code == 1
    assert "Traceback" not in first.errors
    lines = first.errors.splitlines()
    assert lines[:3] == [
        f"error: node 1 ({HOST}): data.sources.0.path: shards/train: neither a folder of shards nor the prefix "
        "of a .bin/.idx pair",
        f"error: node 2 ({HOST}): optim.lrr: unknown key; did you mean optim.lr?",
        f"error: node 0 ({HOST}): run.dir: 0.001 GB are free, but 3 checkpoints of 0.000444 GB "
        "(checkpoint.keep_last and the one being written) need 0.00133 GB more; free disk space or choose another "
        "run.dir",
    ]
    assert lines[3] == (
        f"error: node 0 ({HOST}): run.dir: run.yaml/runs cannot be written: Not a directory; give this user write "
        "permission, or choose another run.dir"
    )
    assert lines[4].startswith(
        f"error: node 0 ({HOST}), node 1 ({HOST}), node 2 ({HOST}): the all-reduce over all ranks failed: "
    )
    assert "nowhere" in lines[4]
    assert len(lines) == 5


def test_ranks_that_cannot_reach_each_other(nodes: list[Node], config: dict[str, Any]) -> None:
    """A port in use, a missing rank, a missing rank 0, and contradicting variables."""
    nodes[0].write(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        busy, free, silent = int(listener.getsockname()[1]), free_port(), free_port()
        wait = ["--timeout", "2"]
        busy_rank, alone, lost = (
            start_rank(nodes[0], 0, 2, busy),
            start_rank(nodes[0], 0, 2, free, wait),
            start_rank(nodes[0], 1, 2, silent, wait),
        )
        wrong = start_rank(nodes[0], 2, 2, free)
        ended = [finish(one) for one in (busy_rank, alone, lost, wrong)]
    assert [one.code for one in ended] == [1, 1, 1, 1]
    assert [one.errors for one in ended] == [
        f"error: node 0 ({HOST}): MASTER_PORT={busy} is in use; stop the process that listens there, or "
        "choose another port\n",
        "error: rank 1 of 2 did not report within 2 s; check the output on their nodes, and whether the launcher has "
        "started them\n",
        f"error: node 1 ({HOST}): rank 0 cannot be reached at MASTER_ADDR=127.0.0.1 MASTER_PORT={silent} within "
        "2 s; check that it runs, that the address is its node's, and the firewall\n",
        "error: RANK=2 is not in 0..WORLD_SIZE-1 with WORLD_SIZE=2\n",
    ]


def test_under_the_launchers(tiny_config: Path) -> None:
    """torchrun, whose agent listens at the port, deepspeed, and plain Python; without importing DeepSpeed."""
    processes = []
    for launcher, module in (("torchrun", "-m"), ("deepspeed", "--module")):
        command = launcher_command(launcher, 2, "launch.preflight", str(tiny_config))
        command.insert(command.index("launch.preflight"), module)
        processes.append(start(command))
    for process in processes:
        finished = finish(process)
        assert finished.code == 0, finished.output + finished.errors
        assert f"preflight: 2 ranks on 1 node ({HOST}), CPU" in finished.output
    code = "import sys, launch.preflight as p\nassert not p.main(sys.argv[1:]) and 'deepspeed' not in sys.modules"
    finished = python("-c", code, tiny_config)
    assert finished.code == 0, finished.output + finished.errors
    assert "preflight: 1 rank on 1 node" in finished.output


FACTS = RankFacts(rank=0, node=0, host="a", sources={"train.py": "1"}, versions={"torch": "2"}, device="CPU")


def on_nodes(*changes: dict[str, Any]) -> list[RankFacts]:
    """Returns the facts of one rank per node, on hosts a, b, …"""
    return [replace(FACTS, rank=rank, node=rank, host="abcd"[rank], **one) for rank, one in enumerate(changes)]


def test_the_node_that_differs_is_named_even_if_it_is_the_first() -> None:
    odd = {"sources": {f"model/{name}.py": "2" for name in "vwxyz"}}
    assert find_problems(on_nodes(odd, {}, {})) == [
        "node 0 (a): different source code than node 1 (b): model/v.py, model/w.py, model/x.py and 3 more; check out "
        "the same revision"
    ]
    assert find_problems(on_nodes({}, {}, {})) == []


def test_gpu_problems_and_loopback_host_names_are_reported() -> None:
    gpu = {"device": "NVIDIA H200", "memory": Need(60e9, 1, 0, 20e9)}
    facts = on_nodes({**gpu, "memory": Need(60e9, 1, 0, 80e9)}, gpu, {"loopback": "127.0.1.1"})
    assert find_problems(facts) == [
        "node 2 (c): no GPU is visible, while node 0 (a) has one; check nvidia-smi and CUDA_VISIBLE_DEVICES",
        "node 1 (b): 20 GB of memory of rank 1's NVIDIA H200 are free, but the run needs about 60 GB; stop what else "
        "uses it, or set a higher deepspeed.zero_stage, train.activation_checkpointing or a lower "
        "train.micro_batch_size",
        "node 2 (c): its host name resolves to 127.0.1.1, which other nodes cannot reach; set GLOO_SOCKET_IFNAME to "
        "the network's interface, or fix /etc/hosts",
    ]
    assert not can_communicate(facts)
    assert can_communicate([FACTS, replace(FACTS, rank=1, loopback="127.0.1.1")])  # one host

    shared = {"device": "NVIDIA H200", "device_id": "x"}
    facts = on_nodes(shared, {**shared, "device_id": "y"}, shared)
    assert find_problems(facts) == [
        "node 0 (a), node 2 (c): ranks 0, 2 share one NVIDIA H200; start one rank for each GPU, and check "
        "CUDA_VISIBLE_DEVICES"
    ]
    assert not can_communicate(facts)
    assert can_communicate(facts[:2])


def test_write_and_network_failures_of_some_ranks_are_reported() -> None:
    reports: list[dict[str, Any]] = [
        {"clock": 10.0},
        {"clock": 3.0, "folder": "Read-only file system"},
        {"clock": 10.0},
    ]
    reports[0]["network"] = reports[2]["network"] = "no answer within 30 s"
    assert find_reported_problems(on_nodes({}, {}, {}), reports, "/runs", None) == [
        "node 1 (b): its clock is 7 s behind the others'; synchronise it (chronyd or systemd-timesyncd)",
        "node 1 (b): run.dir: /runs cannot be written: Read-only file system; give this user write permission, "
        "or choose another run.dir",
        "node 0 (a), node 2 (c): the all-reduce over all ranks failed: no answer within 30 s; check the firewall "
        "between the nodes, and NCCL_SOCKET_IFNAME or, on CPU, GLOO_SOCKET_IFNAME",
    ]


def test_a_file_size_that_differs_from_the_manifest_is_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", seed=1)
    manifest = write_manifest(tmp_path, ["shard"])
    whole = describe_source("data.sources.0", TokenSource.open(tmp_path))
    size = (tmp_path / "shard.idx").stat().st_size
    with (tmp_path / "shard.idx").open("ab") as stream:
        stream.write(b"x")
    source = TokenSource(tmp_path, manifest, [])
    with pytest.raises(RunError) as raised:
        describe_source("data.sources.0", source)
    assert str(raised.value) == (
        f"data.sources.0: {tmp_path}/shard.idx has {size + 1:,} bytes instead of {size:,} as in the manifest; copy the "
        "data again"
    )
    write_shard(tmp_path / "shard", seed=2)
    write_manifest(tmp_path, ["shard"])
    assert describe_source("data.sources.0", TokenSource.open(tmp_path)) != whole
