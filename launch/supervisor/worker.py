"""A worker: starts its node's launcher for the coordinator, passes signals on, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from launch.distributed.topology import free_port
from launch.errors import RunError
from launch.process.stop import LOST_SECONDS
from launch.supervisor.attempt import POLL_SECONDS, Attempt, Launch, Report
from launch.supervisor.node_link import Link, Message
from launch.supervisor.requests import Requests


class Worker:
    """A node's agent.

    Args:
        link: to the head.
        node: this node's number.
        limit_seconds: of silence, after which the head counts as lost.
        requests: signals that this process got; the head is told.
        own_output: whether the ranks may print where this process does; else its standard output is the link, and they
            print to its standard error.
        hello: what else the head is told at the beginning.

    Attributes:
        reason: in one line, why the head did not let this node in; else empty.
    """

    def __init__(
        self, link: Link, node: int, limit_seconds: float, requests: Requests, own_output: bool, **hello: Any
    ) -> None:
        self._link = link
        self._limit_seconds = limit_seconds
        self._requests = requests
        self._num_told = 0
        self._output = None if own_output else sys.stderr.buffer
        self._exit_code: int | None = None
        self.reason = ""
        self._shall_end = False
        self._orphan_since: float | None = None
        self._is_let_in = False
        self._launch: Launch | None = None
        self._signals: list[int] = []
        about = {"host": socket.gethostname(), "machine": machine(), "address": own_address(), "port": free_port("")}
        link.send("hello", node=node, **about, **hello)

    def serve(self) -> int | None:
        """Does what the head asks for. Returns the exit code that it leaves with, or None when it was lost."""
        while not self._shall_leave():
            if self._launch is not None:
                self._run(self._launch)
                self._launch = None
            time.sleep(POLL_SECONDS)
        self._link.close()
        return self._exit_code

    def _run(self, launch: Launch) -> None:
        """One attempt, from its start to the report of its end."""
        try:
            attempt = Attempt(launch, self._say, self._output)
        except (RunError, OSError) as error:
            report = Report(launch.launcher, (), {}, fault=str(error))
        else:
            try:
                attempt.wait(self._signals, lambda: self._shall_leave() or self._shall_end)
            finally:
                attempt.kill()
                report = attempt.close()
        self._link.send("ended", report=report.to_json(), port=free_port(""))

    def _say(self, line: str) -> None:
        self._link.send("event", line=line)

    def _shall_leave(self) -> bool:
        """Takes the head's messages; whether the head wants nothing more of this agent, or is lost."""
        for number in self._requests[self._num_told :]:
            self._link.send("request", number=number)
            self._num_told += 1
        is_closed = self._link.is_closed  # before taking the last messages
        for message in self._link.take():
            self._hear(message)
        if self._exit_code is not None or self._link.silent_seconds > self._limit_seconds:
            return True
        if self._requests and not self._is_let_in:  # who waits for the next start may wait for hours
            return True
        return is_closed and self._is_orphaned_too_long()

    def _hear(self, message: Message) -> None:
        """What comes before a start is about an attempt that has ended; what comes with it is about the new one."""
        if message["kind"] == "setup":
            os.environ.update(message["environ"])
            self._is_let_in = True
        elif message["kind"] == "start":
            self._launch = Launch.from_json(message["launch"])
            self._signals, self._shall_end = [], False
        elif message["kind"] == "signal":
            self._signals.append(message["number"])
        elif message["kind"] == "end":
            self._shall_end = True
        elif message["kind"] == "leave":
            self._exit_code, self.reason = message["code"], message.get("reason", "")

    def _is_orphaned_too_long(self) -> bool:
        """The head has ended without a word. As on a single node, the ranks may save a checkpoint first."""
        if self._orphan_since is None:
            self._orphan_since = time.monotonic()
            self._signals.append(signal.SIGTERM)
        return self._launch is None or time.monotonic() - self._orphan_since > LOST_SECONDS


def machine() -> str:
    """What is the same whichever of its names this host is reached by, and different on others."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot or own_address()}"


def own_address() -> str:
    """An address of this host that others can reach: where ssh came in, else the first that is not loopback."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    addresses = connection[2:3]
    for found in psutil.net_if_addrs().values():
        addresses += [one.address for one in found if one.family == socket.AF_INET]
    return next((address for address in addresses if not _is_loopback(address)), "127.0.0.1")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
