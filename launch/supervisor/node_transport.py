"""How the head reaches the nodes' agents: it starts them through ssh, or they connect to it."""

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

HANDED_OVER = ("NCCL", "GLOO", "UCX", "PYTHON", "OMP_", "CUDA", "DS_", "HF_", "STEADYHEAD_", "TORCH_")
CONNECT_SECONDS = 10  # until a host answers ssh
_LAST_WORDS_SECONDS = 1.0


class Line:
    """A way to one agent.

    Args:
        link: to it.
        node: the agent's node; None where it has yet to say so.

    Attributes:
        last_words: the last line that ssh, or the agent and everything below it, printed to standard error.
    """

    def __init__(self, link: Link, node: int | None = None) -> None:
        self.link = link
        self.node = node
        self.last_words = ""

        self._output: threading.Thread | None = None

    def pass_on(self, stream: IO[bytes], prefix: str) -> None:
        """Prints what the stream brings, line by line, from now on."""
        self._output = threading.Thread(target=self._pass_on, args=(stream, prefix.encode()), daemon=True)
        self._output.start()

    def close(self) -> str:
        """Ends it; the last that was heard."""
        self.link.close()
        if self._output is not None:
            self._output.join(_LAST_WORDS_SECONDS)
        return self.last_words or self.link.noise

    def _pass_on(self, stream: IO[bytes], prefix: bytes) -> None:
        for line in stream:
            self.last_words = line.decode(errors="replace").strip() or self.last_words
            with contextlib.suppress(OSError):
                os.write(1, prefix + line.rstrip(b"\r\n") + b"\n")


class Transport(Protocol):
    """How agents come about.

    Attributes:
        listens: whether agents may come that were not started here.
        variables: for every agent's environment.
    """

    listens: bool
    variables: Mapping[str, str]

    def start(self, missing: Sequence[int]) -> list[Line]:
        """Starts what can be started here of the agents of these nodes."""

    def arrivals(self) -> list[Line]:
        """The agents that have connected since the last call."""

    def complain(self, node: int, words: str) -> str:
        """In one line, that a node did not answer, and the remedy.

        Args:
            words: the last that was heard of it.
        """

    def close(self) -> None:
        """Nobody else is let in."""


class SshTransport:
    """Starts an agent on every host, in this working directory with this interpreter.

    Args:
        hosts: where.
        limit_seconds: of silence, after which a host counts as lost.
        variables: for their environments, see `handed_over`.

    Raises:
        RunError: there is no ssh.
    """

    listens = False

    def __init__(self, hosts: Sequence[Host], limit_seconds: float, variables: Mapping[str, str]) -> None:
        if shutil.which("ssh") is None:
            raise RunError("--hostfile: no such program as ssh on the PATH; install OpenSSH's client")
        self.variables = variables
        self._hosts = hosts
        self._limit_seconds = limit_seconds

    def start(self, missing: Sequence[int]) -> list[Line]:
        """Starts ssh for each."""
        return [self._start(node) for node in missing]

    def arrivals(self) -> list[Line]:
        """None comes by itself."""
        return []

    def complain(self, node: int, words: str) -> str:
        """See `Transport`."""
        name = self._hosts[node].name
        return (
            f"{name}: cannot be used through ssh: {words or 'no answer'}; see whether `ssh -o BatchMode=yes {name} "
            "true` works from here, and whether the project and its .venv are there under the same path"
        )

    def close(self) -> None:
        """Nothing listens."""

    def _start(self, node: int) -> Line:
        name = self._hosts[node].name
        prefix = f"{name}: " if len(self._hosts) > 1 else ""
        return _start_agent(node, ssh_command(name, node, self._limit_seconds), prefix)


class SocketTransport:
    """Starts an agent for this node, number 0, and lets those of the others in.

    Args:
        address, port: where to listen.
        limit_seconds: of silence, after which a node counts as lost.

    Raises:
        RunError: it cannot listen there.
    """

    listens = True
    variables: Mapping[str, str] = {}  # each node has its own

    def __init__(self, address: str, port: int, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._where = f"{address}:{port}"
        try:
            # On every interface: the address may be one that the others see and this node does not have.
            self._listener = socket.create_server(("", port))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise RunError(
                f"--master-port {port}: cannot listen there: {reason}; end what uses it, or choose another"
            ) from None
        self._listener.setblocking(False)

    def start(self, missing: Sequence[int]) -> list[Line]:
        """This node's own."""
        return [_start_agent(0, agent_command(0, self._limit_seconds), "")] if 0 in missing else []

    def arrivals(self) -> list[Line]:
        """Those that connected."""
        lines = []
        with contextlib.suppress(OSError):  # nobody is there, or whoever was has left again
            while True:
                connection, _ = self._listener.accept()
                lines.append(Line(socket_link(connection)))
        return lines

    def complain(self, node: int, words: str) -> str:
        """See `Transport`."""
        return (
            f"node {node} did not come to {self._where}{f' ({words})' if words else ''}; call the same command there "
            f"with --node-rank {node}, and look at the firewall"
        )

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()


def connect(address: str, port: int, seconds: float, is_over: Callable[[], bool]) -> Link | None:
    """A further node's way to the head, who may not listen yet; None when it does not in time, or it is over."""
    end = time.monotonic() + seconds
    while not is_over():
        with contextlib.suppress(OSError):
            return socket_link(socket.create_connection((address, port), timeout=2))
        if time.monotonic() > end:
            return None
        time.sleep(0.2)
    return None


def socket_link(connection: socket.socket) -> Link:
    """A link over a connection."""
    connection.setblocking(True)

    def shut() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    return Link(connection.fileno(), connection.fileno(), shut)


def ssh_command(name: str, node: int, limit_seconds: float) -> list[str]:
    """The command line that starts an agent on a host; a dead connection ends about when the host counts as lost."""
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "LogLevel=ERROR"]
    options += [f"ServerAliveInterval={max(1, round(limit_seconds / 3))}", "ServerAliveCountMax=3"]
    agent = shlex.join(["env", f"PYTHONPATH={python_path(os.environ)}", *agent_command(node, limit_seconds)])
    remote = f"cd {shlex.quote(os.getcwd())} && exec {agent}"
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), "--", name, remote]


def agent_command(node: int, limit_seconds: float) -> list[str]:
    """The command line of an agent that speaks over its standard input and output."""
    return [sys.executable, "-m", "launch.node_agent", str(node), f"{limit_seconds:g}"]


def python_path(environ: Mapping[str, str]) -> str:
    """Where other processes are to look for modules: in this project first."""
    return os.pathsep.join([str(PROJECT_ROOT), *filter(None, [environ.get("PYTHONPATH")])])


def handed_over(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the ranks on other hosts need: by their names, and those of `.deepspeed_env`."""
    chosen = {name: value for name, value in environ.items() if name.startswith(HANDED_OVER)}
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    for folder in (Path.home(), Path()):  # as the deepspeed launcher has it
        with contextlib.suppress(FileNotFoundError):
            text = os.fsdecode((folder / name).read_bytes())  # in whatever encoding, as variables are
            chosen.update(parse_environment(text, str(folder / name)))
    return {**chosen, "PYTHONPATH": python_path(chosen)}


def parse_environment(text: str, source: str) -> dict[str, str]:
    """The variables of a file of lines `NAME=VALUE`; blank lines and comments count for nothing.

    Raises:
        RunError: for any other line.
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


def _start_agent(node: int, command: Sequence[str], prefix: str) -> Line:
    """In a session of its own, so that Ctrl-C in a terminal reaches only the head."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": python_path(os.environ)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None

    def shut() -> None:
        process.kill()
        process.wait()

    line = Line(Link(process.stdout.fileno(), process.stdin.fileno(), shut), node)
    line.pass_on(process.stderr, prefix)
    return line
