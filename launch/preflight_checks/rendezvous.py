"""Exchanges messages between ranks before the network, the data and the configuration are known to be good.

Only rank 0 listens, at MASTER_ADDR:MASTER_PORT, so that every failure can be reported in one line. A process group
would connect all ranks to each other first, and hang if one of the connections fails.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from launch.distributed.topology import Topology
from launch.errors import RunError

_CLOSE_SECONDS = 5.0


class Rendezvous:
    """Connects the ranks of one start.

    Args:
        topology: The topology of this rank.
        timeout_seconds: How long to wait for the slowest rank.

    Attributes:
        store: The store that carries the messages; others may use it with keys of their own.

    Raises:
        RunError: The port is in use, or rank 0 cannot be reached.
    """

    def __init__(self, topology: Topology, timeout_seconds: float) -> None:
        self._topology = topology
        self._timeout_seconds = timeout_seconds
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store: dist.Store = dist.PrefixStore(f"preflight/{attempt}", _open_store(topology, timeout_seconds))

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """Returns every rank's JSON value, in rank order, on rank 0; None on the others. Collective.

        Raises:
            RunError: Some ranks did not report in time; the message names them.
        """
        self._send(f"{name}/{self._topology.rank}", value)
        if not self._topology.is_main:
            return None
        deadline = time.monotonic() + self._timeout_seconds
        keys = {rank: f"{name}/{rank}" for rank in range(self._topology.world_size)}
        missing = [rank for rank, key in keys.items() if not self._arrives(key, deadline)]
        if missing:
            ranks = ", ".join(map(str, missing))
            raise RunError(
                f"rank {ranks} of {self._topology.world_size} did not report within {self._timeout_seconds:.0f} s; "
                "check the output on their nodes, and whether the launcher has started them"
            )
        return [json.loads(self.store.get(key)) for key in keys.values()]

    def broadcast(self, name: str, value: Any) -> Any:
        """Returns rank 0's value on all ranks. Collective.

        Raises:
            RunError: Rank 0 has ended, or sent nothing for twice the timeout.
        """
        if self._topology.is_main:
            self._send(name, value)
            return value
        try:
            self.store.wait([name], timedelta(seconds=2 * self._timeout_seconds))
            return json.loads(self.store.get(name))
        except RuntimeError:
            raise RunError(f"{_here(self._topology)}: lost rank 0, whose message says why") from None

    def close(self) -> None:
        """Waits on rank 0, which hosts the store, until the other ranks are done. Collective."""
        self._send(f"farewell/{self._topology.rank}", None)
        if self._topology.is_main:
            deadline = time.monotonic() + _CLOSE_SECONDS
            for rank in range(self._topology.world_size):
                self._arrives(f"farewell/{rank}", deadline)

    def _send(self, key: str, value: Any) -> None:
        try:
            self.store.set(key, json.dumps(value))
        except RuntimeError:
            raise RunError(f"{_here(self._topology)}: lost rank 0, whose message says why") from None

    def _arrives(self, key: str, deadline: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:
            return False
        return True


def _open_store(topology: Topology, timeout_seconds: float) -> dist.Store:
    if topology.world_size == 1:
        return dist.HashStore()
    address, port = topology.master_addr, topology.master_port
    # torchrun's agent may host the store on this port already.
    listens = topology.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        return dist.TCPStore(address, port, None, listens, timeout, wait_for_workers=False)
    except RuntimeError as error:
        if listens and "EADDRINUSE" in str(error):
            raise RunError(
                f"{_here(topology)}: MASTER_PORT={port} is in use; stop the process that listens there, or choose "
                "another port"
            ) from None
        if listens:
            reason = str(error).splitlines()[0]
            raise RunError(f"{_here(topology)}: cannot listen at {address}:{port}: {reason}") from None
        raise RunError(
            f"{_here(topology)}: rank 0 cannot be reached at MASTER_ADDR={address} MASTER_PORT={port} within "
            f"{timeout_seconds:.0f} s; check that it runs, that the address is its node's, and the firewall"
        ) from None


def _here(topology: Topology) -> str:
    return f"node {topology.node} ({socket.gethostname()})"
