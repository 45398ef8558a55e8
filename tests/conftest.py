"""Shared fixtures: small token shards, a tiny configuration, and ways to start real processes."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data.indexed import IndexedShardWriter, token_dtype
from launch.distributed.topology import free_port

ROOT = Path(__file__).parents[1]
VOCAB_SIZE = 96
# A token whose batches have no finite loss under tests/launch/helpers/worker.py; in no shard but where asked.
POISON = VOCAB_SIZE
NUM_TOKENS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-product", action="store_true", help="every combination of the exactness tests (an hour)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full-product"):
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    code: int
    output: str
    errors: str


def write_shard(prefix: Path, seed: int, num_tokens: int = NUM_TOKENS, vocab_size: int = VOCAB_SIZE) -> Path:
    """A Megatron pair of documents with a learnable pattern: each token is near the one before."""
    rng = np.random.default_rng(seed)
    tokens = np.cumsum(rng.integers(-3, 4, num_tokens)) % vocab_size
    with IndexedShardWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in np.array_split(tokens, 20):
            writer.add_document(document)
    return prefix


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session that all pytest-xdist workers share; a file lock must protect what is made there."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prefixes of a training and a validation shard without manifest."""
    folder = tmp_path_factory.mktemp("shards")
    return {"train": write_shard(folder / "train", seed=1), "val": write_shard(folder / "val", seed=2)}


@pytest.fixture
def tiny_config(tmp_path: Path, shards: dict[str, Path]) -> Path:
    """A configuration file of a run that takes a second, with accumulation 2 on one rank."""
    config = {
        "run": {"dir": str(tmp_path / "runs"), "name": "tiny"},
        "model": {
            "vocab_size": VOCAB_SIZE,
            "dim": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "max_seq_len": 32,
        },
        "optim": {"lr": 5e-3, "warmup_steps": 2},
        "data": {"sources": [{"path": str(shards["train"])}], "val_sources": {"held_out": str(shards["val"])}},
        "train": {"steps": 6, "global_batch_tokens": 256, "micro_batch_size": 2, "precision": "fp32"},
        "validation": {"every_steps": 3, "batches": 2},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def environment() -> dict[str, str]:
    """The environment of a started process: no launcher's variables, one thread."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in launcher}
    scripts = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{scripts}:{kept['PATH']}", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def start(command: Sequence[str], variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts a command at the project's root in a process group of its own, with more environment variables."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 180) -> Finished:
    """Waits for a process; ends its whole group when it takes too long."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"{process.args} took more than {timeout} s\n{output}\n{errors}")
    return Finished(process.returncode, output, errors)


def python(*arguments: str | Path, timeout: float = 180) -> Finished:
    """Runs this interpreter at the project's root."""
    return finish(start([sys.executable, *map(str, arguments)]), timeout)


class ForkServer:
    """Runs Python processes that need not import torch and DeepSpeed: see tests/launch/helpers/forkserver.py."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forkserver-")
        self._num_started = 0
        self._server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/launch/helpers/forkserver.py")],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, processes: Sequence[tuple[Sequence[str], Mapping[str, str]]], timeout: float) -> list[Finished]:
        """Runs processes (arguments of Python, more environment variables) side by side, and waits for all of them."""
        assert self._server.stdin is not None and self._server.stdout is not None
        wanted = []
        for arguments, variables in processes:
            self._num_started += 1
            path = f"{self._folder.name}/{self._num_started}"
            environ = {**environment(), **variables}
            wanted.append({"arguments": arguments, "environ": environ, "output": path, "errors": f"{path}.errors"})
        self._server.stdin.write(json.dumps({"processes": wanted, "timeout": timeout}) + "\n")
        self._server.stdin.flush()
        codes = json.loads(self._server.stdout.readline())
        texts = [(Path(one["output"]).read_text(), Path(one["errors"]).read_text()) for one in wanted]
        assert None not in codes, f"{processes} took more than {timeout} s, or outlived a failed one: {texts}"
        return [Finished(code, *text) for code, text in zip(codes, texts, strict=True)]

    def close(self) -> None:
        """Ends the server."""
        self._server.communicate()
        self._folder.cleanup()


@functools.cache
def fork_server() -> ForkServer:
    """The server of this pytest process, which starts at its first use."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def preloaded_python(*arguments: str | Path, timeout: float = 180) -> Finished:
    """What `python` returns, from a process that has its imports already: for the many cases of one kind."""
    (finished,) = fork_server().run([(list(map(str, arguments)), {})], timeout)
    return finished


def preloaded_ranks(num_ranks: int, *arguments: str | Path, timeout: float = 180) -> None:
    """Runs a script on ranks of one process group, as `torchrun` would; all must end with 0."""
    group = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    words = list(map(str, arguments))
    for rank, finished in enumerate(fork_server().run([(words, variables) for variables in ranks], timeout)):
        assert finished.code == 0, f"rank {rank}: {finished.output}{finished.errors}"


def launcher_command(launcher: str, num_ranks: int, script: str | Path, *arguments: str) -> list[str]:
    """The command line that starts `script` on `num_ranks` CPU ranks, with a port of its own."""
    port = str(free_port())
    scripts = Path(sys.executable).parent
    if launcher == "deepspeed":
        start_with = [str(scripts / "deepspeed"), "--num_gpus", str(num_ranks), "--master_port", port]
    elif launcher == "torchrun":
        start_with = [str(scripts / "torchrun"), "--nproc_per_node", str(num_ranks), "--master_port", port]
    else:
        assert num_ranks == 1
        start_with = [sys.executable]
    return [*start_with, str(script), *arguments]


Case = tuple[Path, list[str]]


@pytest.fixture
def run_cases(tmp_path: Path) -> Callable[..., list[list[Any]]]:
    """Runs cases (configuration file, overrides) in one process group; returns each rank's outcomes."""

    def run(num_ranks: int, cases: Sequence[Case], timeout: float = 400) -> list[list[Any]]:
        path = tmp_path / f"cases_{len(list(tmp_path.glob('cases_*')))}.json"
        path.write_text(json.dumps([[str(config), overrides] for config, overrides in cases]))
        preloaded_ranks(num_ranks, ROOT / "tests/launch/helpers/worker.py", path, timeout=timeout)
        return [json.loads(Path(f"{path}.rank_{rank}").read_text()) for rank in range(num_ranks)]

    return run


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
