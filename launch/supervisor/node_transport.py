"""How the coordinator reaches the nodes' workers: it starts them through ssh, or they connect to it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from launch import PROJECT_ROOT
from launch.errors import RunError
from launch.supervisor.hostfile import Host
from launch.supervisor.node_link import Link

FORWARDED_PREFIXES = ("NCCL", "GLOO", "UCX", "PYTHON", "OMP_", "CUDA", "DS_", "HF_", "STEADYHEAD_", "TORCH_")
CONNECT_SECONDS = 10  # until a host answers ssh
_LAST_OUTPUT_SECONDS = 1.0


class WorkerConnection:
    """The connection to one worker.

    Args:
        link: The link to the worker.
        node: The worker's node number; None until the worker has reported it.

    Attributes:
        last_output: The last line on standard error, of ssh or of the worker and its child processes.
    """

    def __init__(self, link: Link, node: int | None = None) -> None:
        self.link = link
        self.node = node
        self.last_output = ""
        self._output: threading.Thread | None = None

    def forward_output(self, stream: IO[bytes], prefix: str) -> None:
        """Starts a thread that prints the stream line by line."""
        self._output = threading.Thread(target=self._forward_output, args=(stream, prefix.encode()), daemon=True)
        self._output.start()

    def close(self) -> str:
        """Closes the connection and returns the last line that was received."""
        self.link.close()
        if self._output is not None:
            self._output.join(_LAST_OUTPUT_SECONDS)
        return self.last_output or self.link.last_unparsed

    def _forward_output(self, stream: IO[bytes], prefix: bytes) -> None:
        for line in stream:
            self.last_output = line.decode(errors="replace").strip() or self.last_output
            with contextlib.suppress(OSError):
                os.write(1, prefix + line.rstrip(b"\r\n") + b"\n")


class Transport(Protocol):
    """How connections to workers are made.

    Attributes:
        listens: Whether workers that were started elsewhere may connect.
        variables: Environment variables for every worker.
    """

    listens: bool
    variables: Mapping[str, str]

    def start(self, missing: Sequence[int]) -> list[WorkerConnection]:
        """Starts those workers of these nodes that can be started from here."""

    def accept(self) -> list[WorkerConnection]:
        """Returns the workers that have connected since the last call."""

    def describe_failure(self, node: int, last_output: str) -> str:
        """Returns one line that says that a node did not answer, and what to do.

        Args:
            last_output: The last line that was received from it.
        """

    def close(self) -> None:
        """Stops accepting connections."""


class SshTransport:
    """Starts a worker on every host, in this working directory and with this interpreter.

    Args:
        hosts: The hosts of the nodes.
        limit_seconds: The silence after which a host counts as lost.
        variables: Environment variables for the workers, see `forwarded_variables`.

    Raises:
        RunError: There is no ssh.
    """

    listens = False

    def __init__(self, hosts: Sequence[Host], limit_seconds: float, variables: Mapping[str, str]) -> None:
        if shutil.which("ssh") is None:
            raise RunError("--hostfile: no such program as ssh on the PATH; install OpenSSH's client")
        self.variables = variables
        self._hosts = hosts
        self._limit_seconds = limit_seconds

    def start(self, missing: Sequence[int]) -> list[WorkerConnection]:
        """Starts ssh for each node."""
        return [self._start(node) for node in missing]

    def accept(self) -> list[WorkerConnection]:
        """Returns nothing: all workers are started from here."""
        return []

    def describe_failure(self, node: int, last_output: str) -> str:
        """See `Transport`."""
        name = self._hosts[node].name
        return (
            f"{name}: cannot be reached through ssh: {last_output or 'no answer'}; check that "
            f"`ssh -o BatchMode=yes {name} true` works from here, and that the project and its .venv have the same "
            "path there"
        )

    def close(self) -> None:
        """Does nothing: nothing listens."""

    def _start(self, node: int) -> WorkerConnection:
        name = self._hosts[node].name
        prefix = f"{name}: " if len(self._hosts) > 1 else ""
        return _start_worker(node, ssh_command(name, node, self._limit_seconds), prefix)


class SocketTransport:
    """Starts a worker for this node, number 0, and accepts those of the other nodes.

    Args:
        address, port: Where to listen.
        limit_seconds: The silence after which a node counts as lost.

    Raises:
        RunError: It cannot listen on the port.
    """

    listens = True
    variables: Mapping[str, str] = {}  # each node has its own

    def __init__(self, address: str, port: int, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._endpoint = f"{address}:{port}"
        try:
            # On every interface: the address may be one that the others see and this node does not have.
            self._listener = socket.create_server(("", port))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise RunError(
                f"--master-port {port}: cannot listen: {reason}; stop the process that uses it, or choose another port"
            ) from None
        self._listener.setblocking(False)

    def start(self, missing: Sequence[int]) -> list[WorkerConnection]:
        """Starts this node's worker."""
        return [_start_worker(0, worker_command(0, self._limit_seconds), "")] if 0 in missing else []

    def accept(self) -> list[WorkerConnection]:
        """See `Transport`."""
        connections = []
        with contextlib.suppress(OSError):  # no connection is pending, or the client has closed it already
            while True:
                connection, _ = self._listener.accept()
                connections.append(WorkerConnection(socket_link(connection)))
        return connections

    def describe_failure(self, node: int, last_output: str) -> str:
        """See `Transport`."""
        return (
            f"node {node} did not connect to {self._endpoint}{f' ({last_output})' if last_output else ''}; run the "
            f"same command there with --node-rank {node}, and check the firewall"
        )

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()


def connect(address: str, port: int, seconds: float, is_cancelled: Callable[[], bool]) -> Link | None:
    """Connects a worker to the coordinator, which may not listen yet; None on timeout or cancellation."""
    end = time.monotonic() + seconds
    while not is_cancelled():
        with contextlib.suppress(OSError):
            return socket_link(socket.create_connection((address, port), timeout=2))
        if time.monotonic() > end:
            return None
        time.sleep(0.2)
    return None


def socket_link(connection: socket.socket) -> Link:
    """Returns a link over a connection."""
    connection.setblocking(True)

    def on_close() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    return Link(connection.fileno(), connection.fileno(), on_close)


def ssh_command(name: str, node: int, limit_seconds: float) -> list[str]:
    """Returns the command line that starts a worker on a host.

    ssh gives up a dead connection at about the time at which the host counts as lost.
    """
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "LogLevel=ERROR"]
    options += [f"ServerAliveInterval={max(1, round(limit_seconds / 3))}", "ServerAliveCountMax=3"]
    worker = shlex.join(["env", f"PYTHONPATH={python_path(os.environ)}", *worker_command(node, limit_seconds)])
    remote = f"cd {shlex.quote(os.getcwd())} && exec {worker}"
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), "--", name, remote]


def worker_command(node: int, limit_seconds: float) -> list[str]:
    """Returns the command line of a worker whose link is its standard input and output."""
    return [sys.executable, "-m", "launch.node_agent", str(node), f"{limit_seconds:g}"]


def python_path(environ: Mapping[str, str]) -> str:
    """Returns PYTHONPATH for child processes, with this project first."""
    return os.pathsep.join([str(PROJECT_ROOT), *filter(None, [environ.get("PYTHONPATH")])])


def forwarded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for the ranks on other hosts: by their prefixes, and those of `.deepspeed_env`."""
    chosen = {name: value for name, value in environ.items() if name.startswith(FORWARDED_PREFIXES)}
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    for folder in (Path.home(), Path()):  # in the deepspeed launcher's order
        with contextlib.suppress(FileNotFoundError):
            text = os.fsdecode((folder / name).read_bytes())  # the encoding of environment variables
            chosen.update(parse_environment(text, str(folder / name)))
    return {**chosen, "PYTHONPATH": python_path(chosen)}


def parse_environment(text: str, source: str) -> dict[str, str]:
    """Parses the `NAME=VALUE` lines of a file; blank lines and comments are ignored.

    Raises:
        RunError: Another line is in it.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if content and not content.startswith("#"):
            name, equals, value = content.partition("=")
            if not equals or not name.isidentifier():
                raise RunError(f"{source}:{number}: {content!r} is not NAME=VALUE")
            found[name] = value
    return found


def _start_worker(node: int, command: Sequence[str], prefix: str) -> WorkerConnection:
    """Starts a worker in a session of its own, so that Ctrl-C in a terminal reaches only the coordinator."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": python_path(os.environ)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None

    def on_close() -> None:
        process.kill()
        process.wait()

    connection = WorkerConnection(Link(process.stdout.fileno(), process.stdin.fileno(), on_close), node)
    connection.forward_output(process.stderr, prefix)
    return connection
