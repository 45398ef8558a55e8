"""Two hosts on one machine: network namespaces joined by a virtual cable. Each has its own sshd, processes, host name
and shared memory, and shares the machine's files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import ROOT, environment

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "pdsh", "ip", "nsenter", "unshare")
START_SECONDS = 20.0
SSH_PORT = 2222
_PATH = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"

_INIT = """\
set -e
hostname {name}
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
mkdir -p /etc/ssh/ssh_config.d
mount --bind {folder}/ssh_config.d /etc/ssh/ssh_config.d
mkdir -p /run/sshd
mount -t tmpfs none /dev/shm
exec /usr/sbin/sshd -D -f {folder}/{name}.sshd
"""

_SSHD = """\
Port {port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
"""

_SSH = """\
Host *
    Port {port}
    IdentityFile {folder}/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    BatchMode yes
    LogLevel ERROR
"""


def why_not() -> str | None:
    """Returns why such hosts cannot be created here; None if they can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} missing; Debian's packages are openssh-server, pdsh and iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root here"
    name = f"probe-{secrets.token_hex(3)}"
    probed = _run("ip", "netns", "add", name, check=False)
    if probed.returncode != 0:
        return f"network namespaces are not allowed here: {probed.stderr.strip()}"
    _run("ip", "netns", "delete", name)
    return None


@dataclass(frozen=True)
class TestHost:
    """One of the two hosts.

    Attributes:
        name: The host name.
        address: The address of its end of the cable.
        namespace: The name of its network namespace.
        init: The process id of its first process, in this process's namespace.
    """

    __test__ = False  # for pytest

    name: str
    address: str
    namespace: str
    init: int

    def start(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command on the host, at the project's root."""
        variables = {
            "HOME": str(Path.home()),
            "PATH": _PATH,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "eth0",
            **(variables or {}),
        }
        enter = ["nsenter", "-t", str(self.init), "-a", f"--wd={ROOT}"]
        return subprocess.Popen(
            [*enter, "env", "-i", *(f"{name}={value}" for name, value in variables.items()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @staticmethod
    def signal(process: subprocess.Popen[str], number: int) -> None:
        """Sends a signal to a command that was started there, since nsenter, its parent, does not forward signals."""
        (command,) = psutil.Process(process.pid).children()
        command.send_signal(number)

    def processes(self, *words: str) -> list[psutil.Process]:
        """Returns the host's Python processes whose command line contains all these strings."""
        found = []
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                line = " ".join(process.cmdline())
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
                if is_here and "python" in line and "sshd" not in line and all(word in line for word in words):
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Returns the processes that run train.py themselves."""
        return [process for process in self.processes("train.py") if _is_rank(process)]


class TwoHosts:
    """Both hosts, and the cable between them.

    Attributes:
        hosts: The hosts a and b.
        folder: The folder of their files.
    """

    def __init__(self, hosts: tuple[TestHost, TestHost], folder: Path) -> None:
        self.a, self.b = self.hosts = hosts
        self.folder = folder

    def hostfile(self, slots: int = 1, more: str = "", b_first: bool = False) -> str:
        """Writes a hostfile with both hosts and returns its path; rank 0 is on the first host."""
        path = self.folder / f"hosts-{secrets.token_hex(4)}"
        hosts = reversed(self.hosts) if b_first else self.hosts
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in hosts) + more)
        return str(path)

    def cut(self) -> None:
        """Cuts the cable silently: packets go to a hardware address that does not exist."""
        for here, there in ((self.a, self.b), (self.b, self.a)):
            unused = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
            _run("ip", "-n", here.namespace, "neigh", "replace", there.address, *unused, "dev", "eth0")

    def restore(self) -> None:
        """Restores the cable."""
        for here, there in ((self.a, self.b), (self.b, self.a)):
            _run("ip", "-n", here.namespace, "neigh", "delete", there.address, "dev", "eth0", check=False)

    def left(self) -> list[str]:
        """Returns the command lines of all processes of a run that are still running."""
        lines = []
        for host in self.hosts:
            for process in host.processes():
                with contextlib.suppress(psutil.Error):
                    lines.append(f"{host.name}: {' '.join(process.cmdline())[:200]}")
        return lines

    def kill_all(self) -> None:
        """Kills all processes of runs."""
        for host in self.hosts:
            for process in host.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Creates the hosts, and removes them with all their processes."""
    folder = Path(tempfile.mkdtemp(prefix="two-hosts-", dir="/tmp"))
    names = ("host-a", "host-b")
    namespaces = [f"{name}-{folder.name[-6:]}" for name in names]
    inits: list[subprocess.Popen[bytes]] = []
    try:
        _write_files(folder, names)
        _connect(namespaces)
        for name, namespace in zip(names, namespaces, strict=True):
            inits.append(_boot(folder, name, namespace))
        hosts = tuple(
            TestHost(name, f"10.77.0.{number}", namespace, _child_of(init))
            for number, (name, namespace, init) in enumerate(zip(names, namespaces, inits, strict=True), start=1)
        )
        made = TwoHosts((hosts[0], hosts[1]), folder)
        _wait_for_ssh(made)
        yield made
    finally:
        for init in inits:
            init.kill()  # --kill-child also kills the host's first process, and with it all others
            init.wait()
        for namespace in namespaces:
            _run("ip", "netns", "delete", namespace, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _write_files(folder: Path, names: Sequence[str]) -> None:
    for name in ("key", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    addresses = "".join(f"10.77.0.{number} {name}\n" for number, name in enumerate(names, start=1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}10.77.0.3 host-c\n")  # host-c does not exist
    (folder / "ssh_config.d").mkdir()
    (folder / "ssh_config.d/test.conf").write_text(_SSH.format(port=SSH_PORT, folder=folder))
    for name in names:
        (folder / f"{name}.sshd").write_text(_SSHD.format(port=SSH_PORT, folder=folder))
        (folder / f"{name}.init").write_text(_INIT.format(name=name, folder=folder))


def _connect(namespaces: Sequence[str]) -> None:
    """Creates a virtual cable, with the same interface name at both ends."""
    a, b = namespaces
    for namespace in namespaces:
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
    _run("ip", "link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
    for number, namespace in enumerate(namespaces, start=1):
        _run("ip", "-n", namespace, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")


def _boot(folder: Path, name: str, namespace: str) -> subprocess.Popen[bytes]:
    separate = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *separate, "bash", str(folder / f"{name}.init")],
            env={"PATH": _PATH},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _child_of(init: subprocess.Popen[bytes]) -> int:
    """Returns the process id of the host's first process: `ip` becomes `unshare`, which has one child."""
    end = time.monotonic() + START_SECONDS
    while not (children := psutil.Process(init.pid).children()):
        assert init.poll() is None and time.monotonic() < end, "the host did not start"
        time.sleep(0.02)
    return children[0].pid


def _wait_for_ssh(hosts: TwoHosts) -> None:
    end = time.monotonic() + START_SECONDS
    for here, there in ((hosts.a, hosts.b), (hosts.b, hosts.a)):
        while True:
            process = here.start(["ssh", there.name, "hostname"])
            output, errors = process.communicate(timeout=30)
            if output.strip() == there.name:
                break
            logs = "".join(path.read_text() for path in hosts.folder.glob("*.log"))
            assert time.monotonic() < end, f"{here.name} does not reach {there.name}: {output}{errors}{logs}"
            time.sleep(0.1)


def _is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
        return any(Path(word).name == "train.py" for word in words[1:3]) and "RANK" in process.environ()
    except (psutil.Error, OSError):
        return False


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(
        command, env={**environment(), "PATH": _PATH}, capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == 0 or not check, f"{command}: {finished.stdout}{finished.stderr}"
    return finished
