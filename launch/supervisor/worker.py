"""The worker on a node: starts the launcher for the coordinator, forwards signals, and leaves no process behind."""

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
from launch.process.stop import ORPHAN_GRACE_SECONDS
from launch.supervisor.attempt import POLL_SECONDS, Attempt, Launch, Report
from launch.supervisor.node_link import Link, Message
from launch.supervisor.requests import Requests


class Worker:
    """The worker of one node.

    Args:
        link: The link to the coordinator.
        node: This node's number.
        limit_seconds: The silence after which the coordinator counts as lost.
        requests: Signals that this process received, which are reported to the coordinator.
        own_output: Whether the ranks may print to this process's standard output; otherwise that is the link, and they
            print to standard error.
        hello: More values for the first message to the coordinator.

    Attributes:
        reason: Why the coordinator refused this node, in one line; empty when it did not.
    """

    def __init__(
        self, link: Link, node: int, limit_seconds: float, requests: Requests, own_output: bool, **hello: Any
    ) -> None:
        self._link = link
        self._limit_seconds = limit_seconds
        self._requests = requests
        self._num_reported = 0
        self._output = None if own_output else sys.stderr.buffer
        self._exit_code: int | None = None
        self.reason = ""
        self._must_end = False
        self._orphan_since: float | None = None
        self._is_admitted = False
        self._launch: Launch | None = None
        self._signals: list[int] = []
        about = {"host": socket.gethostname(), "machine": machine_id(), "address": own_address(), "port": free_port("")}
        link.send("hello", node=node, **about, **hello)

    def serve(self) -> int | None:
        """Follows the coordinator's messages. Returns the exit code that it sends, or None when it was lost."""
        while not self._must_leave():
            if self._launch is not None:
                self._run(self._launch)
                self._launch = None
            time.sleep(POLL_SECONDS)
        self._link.close()
        return self._exit_code

    def _run(self, launch: Launch) -> None:
        """Runs one attempt and reports how it ended."""
        try:
            attempt = Attempt(launch, self._log_event, self._output)
        except (RunError, OSError) as error:
            report = Report(launch.launcher, (), {}, fault=str(error))
        else:
            try:
                attempt.wait(self._signals, lambda: self._must_leave() or self._must_end)
            finally:
                attempt.kill()
                report = attempt.close()
        self._link.send("ended", report=report.to_json(), port=free_port(""))

    def _log_event(self, line: str) -> None:
        self._link.send("event", line=line)

    def _must_leave(self) -> bool:
        """Exchanges messages; returns whether the coordinator has dismissed this worker or is lost."""
        for number in self._requests[self._num_reported :]:
            self._link.send("request", number=number)
            self._num_reported += 1
        is_closed = self._link.is_closed  # read before the last messages are received
        for message in self._link.receive():
            self._handle(message)
        if self._exit_code is not None or self._link.silent_seconds > self._limit_seconds:
            return True
        if self._requests and not self._is_admitted:  # the next start may be hours away
            return True
        return is_closed and self._grace_is_over()

    def _handle(self, message: Message) -> None:
        """Handles a message. A start discards earlier signals and `end` messages, which belong to the last attempt."""
        if message["kind"] == "setup":
            os.environ.update(message["environ"])
            self._is_admitted = True
        elif message["kind"] == "start":
            self._launch = Launch.from_json(message["launch"])
            self._signals, self._must_end = [], False
        elif message["kind"] == "signal":
            self._signals.append(message["number"])
        elif message["kind"] == "end":
            self._must_end = True
        elif message["kind"] == "leave":
            self._exit_code, self.reason = message["code"], message.get("reason", "")

    def _grace_is_over(self) -> bool:
        """After the coordinator has died, lets the ranks save a checkpoint first, as on a single node."""
        if self._orphan_since is None:
            self._orphan_since = time.monotonic()
            self._signals.append(signal.SIGTERM)
        return self._launch is None or time.monotonic() - self._orphan_since > ORPHAN_GRACE_SECONDS


def machine_id() -> str:
    """Returns an identifier of this host that does not depend on the name by which it was reached."""
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot_id or own_address()}"


def own_address() -> str:
    """Returns an address at which others reach this host: the one ssh used, else the first that is not loopback."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    addresses = connection[2:3]
    for found in psutil.net_if_addrs().values():
        addresses += [one.address for one in found if one.family == socket.AF_INET]
    return next((address for address in addresses if not _is_loopback(address)), "127.0.0.1")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
