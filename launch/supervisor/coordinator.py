"""The coordinator of a run on several nodes: tracks the nodes, starts attempts on all of them, and merges the reports.

Each node has a worker (`launch.node_agent`) that starts and watches the node's launcher. The coordinator decides from
what the workers report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from launch.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, RunError
from launch.supervisor.attempt import KILL_SECONDS, POLL_SECONDS, TEARDOWN_SECONDS, Launch, Place, Report
from launch.supervisor.node_link import Message
from launch.supervisor.node_transport import Transport, WorkerConnection
from launch.supervisor.requests import Requests

RECONNECT_SECONDS = 15.0  # for nodes that were lost, before a restart
_SHUTDOWN_SECONDS = 3.0
_HELLO_KEYS = {"node", "host", "machine", "address", "port"}
_SUCCESS_CODES = (EXIT_DONE, EXIT_STOPPED)


@dataclass
class Node:
    """A node whose worker answers.

    Attributes:
        number: Its number among all nodes that the user named.
        name: Its name in messages.
        connection: The connection to its worker.
        address: The address at which other nodes reach it.
        port: A port that was free there when it was reported.
        machine: An identifier that two nodes share only if they are the same host.
        report: The report of the attempt that has ended there; None while it runs, or before the first.
    """

    number: int
    name: str
    connection: WorkerConnection
    address: str
    port: int
    machine: str
    report: Report | None = None


class Coordinator:
    """All nodes of a run.

    Args:
        names: The nodes' names in messages.
        transport: Connects to their workers.
        limit_seconds: The silence after which a node counts as lost.
        requests: The coordinator's signals; signals that workers received are added.
        log_event: Called with one line for each event.
        arguments: The run's arguments; workers that connect by themselves must have been started with the same ones.
        master_addr: The address of node 0, where rank 0 listens; None: the address that node 0 reports.
    """

    def __init__(
        self,
        names: Sequence[str],
        transport: Transport,
        limit_seconds: float,
        requests: Requests,
        log_event: Callable[[str], None],
        arguments: Sequence[str] = (),
        master_addr: str | None = None,
    ) -> None:
        self._names = names
        self._transport = transport
        self._limit_seconds = limit_seconds
        self._requests = requests
        self._log_event = log_event
        self._arguments = list(arguments)
        self._master_addr = master_addr
        self._present: dict[int, Node] = {}
        self._pending: list[WorkerConnection] = []  # not admitted yet

    @property
    def present(self) -> list[Node]:
        """The nodes that answer, in order of their numbers."""
        return [self._present[number] for number in sorted(self._present)]

    @property
    def _missing(self) -> list[int]:
        return [number for number in range(len(self._names)) if number not in self._present]

    def wait_for_nodes(self, seconds: float) -> list[str]:
        """Waits for the missing nodes, if any. Returns one line for each node that is still missing."""
        deadline = time.monotonic() + seconds
        self._pending += self._transport.start(self._missing)
        last_outputs: dict[int, str] = {}
        refusals: dict[int, str] = {}
        while set(self._missing) - set(refusals) and not self._requests and time.monotonic() < deadline:
            if not self._pending and not self._transport.listens:
                break
            for connection in list(self._pending):
                messages = connection.link.receive()
                if connection.link.is_closed:
                    self._pending.remove(connection)
                    last_output = connection.close()
                    if connection.node is not None:
                        last_outputs[connection.node] = last_output
                elif messages:
                    self._pending.remove(connection)
                    refusals.update(self._admit(connection, *messages))
            self.poll()
            time.sleep(POLL_SECONDS)  # the next poll notices a worker that has disconnected at once
        for connection in self._pending:
            connection.close()
        self._pending.clear()
        return [
            refusals.get(number) or self._transport.describe_failure(number, last_outputs.get(number, ""))
            for number in self._missing
        ]

    def recover_lost_nodes(self) -> None:
        """Tries to reconnect to lost nodes, before a restart.

        Raises:
            RunError: No node is left.
        """
        missing = self._missing
        for problem in self.wait_for_nodes(RECONNECT_SECONDS):
            self._log_event(f"continuing without {problem}")
        for number in set(missing) & set(self._present):
            self._log_event(f"{self._present[number].name} is back")
        if not self._present and not self._requests:
            raise RunError("no node answers any more")

    def poll(self) -> list[str]:
        """Handles the workers' messages. Returns one line for each node that was lost since the last call.

        Accepts workers that connect meanwhile: they receive heartbeats at once, and wait for the next start.
        """
        lost_pending = [
            connection for connection in self._pending if connection.node is None and self._is_lost(connection)
        ]
        for connection in lost_pending:
            self._pending.remove(connection)
            connection.close()
        self._pending += self._transport.accept()
        lost = []
        for node in self.present:
            is_closed = node.connection.link.is_closed
            for message in node.connection.link.receive():
                self._handle(node, message)
            silent_seconds = node.connection.link.silent_seconds
            if is_closed or silent_seconds > self._limit_seconds:
                reason = "its worker has ended" if is_closed else f"no answer for {silent_seconds:.0f} s"
                lost.append(self.drop(node, reason))
        return lost

    def start(self, launch: Launch) -> MultiNodeAttempt:
        """Starts a launcher on every node that answers."""
        return MultiNodeAttempt(self, launch)

    def place(self, index: int) -> Place:
        """Returns the place of the node with this index among the nodes that answer."""
        first = self.present[0]
        configured = self._master_addr if first.number == 0 else None
        return Place(index, len(self._present), configured or first.address, first.port)

    def drop(self, node: Node, reason: str) -> str:
        """Gives up a node; returns the line that was logged."""
        del self._present[node.number]
        node.connection.close()
        line = f"lost {node.name}: {reason}"
        self._log_event(line)
        return line

    def shut_down(self, exit_code: int) -> None:
        """Dismisses all workers; a `launch.run` that serves as one ends with this exit code."""
        connections = [*(node.connection for node in self.present), *self._pending]
        for connection in connections:
            connection.link.send("leave", code=exit_code)
        end = time.monotonic() + _SHUTDOWN_SECONDS
        while time.monotonic() < end and not all(connection.link.is_closed for connection in connections):
            time.sleep(POLL_SECONDS)
        for connection in connections:
            connection.close()
        self._transport.close()

    def _is_lost(self, connection: WorkerConnection) -> bool:
        return connection.link.is_closed or connection.link.silent_seconds > self._limit_seconds

    def _handle(self, node: Node, message: Message) -> None:
        if message["kind"] == "event":
            self._log_event(f"{node.name}: {message['line']}")
        elif message["kind"] == "request":
            self._requests.add(message["number"], node.name)
        elif message["kind"] == "ended":
            node.report, node.port = Report.from_json(message["report"]), message["port"]

    def _admit(self, connection: WorkerConnection, hello: Message, *more: Message) -> dict[int, str]:
        """Admits a worker, or refuses it: then returns its number and the reason in one line."""
        if hello["kind"] != "hello" or not hello.keys() >= _HELLO_KEYS:
            connection.close()
            reason = "its worker runs another revision of the project; bring it to the same one"
            return {} if connection.node is None else {connection.node: f"{self._names[connection.node]}: {reason}"}
        number = hello["node"]
        refusal = self._refusal(hello)
        if refusal:
            connection.link.send("leave", code=EXIT_USAGE, reason=refusal)
            if number in self._missing:
                return {number: refusal}
            self._log_event(refusal)
            return {}
        name = self._names[number] or f"node {number} ({hello['host']})"
        connection.link.send("setup", environ=self._transport.variables)
        node = Node(number, name, connection, hello["address"], hello["port"], hello["machine"])
        self._present[number] = node
        for message in more:
            self._handle(node, message)
        return {}

    def _refusal(self, hello: Message) -> str:
        """Returns why a worker is refused, in one line; empty when it is not."""
        number, host = hello["node"], hello["host"]
        if number not in self._missing:
            return f"{host}: --node-rank {number}: taken by another node, or not below the {len(self._names)} nodes"
        theirs = hello.get("arguments", self._arguments)
        if theirs != self._arguments:
            here = ", ".join(one for one in theirs if one not in self._arguments)
            there = ", ".join(one for one in self._arguments if one not in theirs)
            difference = f"{here or 'nothing'} where node 0 has {there or 'nothing'}"
            return (
                f"{host}: node {number} has {difference if here or there else 'its arguments in another order'}; use "
                "the same command on all nodes (--num-ranks defaults to the number of the node's GPUs)"
            )
        # Where the command is run on every node, two of them on one machine are intended, e.g. as a trial.
        duplicates = [node.name for node in self.present if self._names[number] and node.machine == hello["machine"]]
        if duplicates:
            return (
                f"{self._names[number]}: is the same host ({host}) as {duplicates[0]}; remove one of them from the "
                "hostfile"
            )
        return ""


class MultiNodeAttempt:
    """One start of a launcher on every node; has the interface of `launch.supervisor.attempt.Attempt`."""

    def __init__(self, coordinator: Coordinator, launch: Launch) -> None:
        self._coordinator = coordinator
        self._launch = launch
        self._num_signals_sent = 0
        self._faults: list[str] = []
        self._started = coordinator.present
        for index, node in enumerate(self._started):
            node.report = None
            node.connection.link.send("start", launch=replace(launch, place=coordinator.place(index)).to_json())

    def wait(self, requests: Requests) -> None:
        """Waits until the attempt has ended on all nodes that answer, and none of its processes is left there."""
        deadline: float | None = None
        while self._running() and not requests.must_kill:
            self._faults += self._coordinator.poll()
            for number in requests[self._num_signals_sent :]:
                for node in self._running():
                    node.connection.link.send("signal", number=number)
                self._num_signals_sent += 1
            if deadline is None and self._has_failed():
                deadline = time.monotonic() + TEARDOWN_SECONDS
            # The ranks of a lost node cannot take part in collectives any more.
            if self._faults or (deadline is not None and time.monotonic() > deadline):
                break
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kills all processes and waits until they have ended; gives up nodes that do not confirm it."""
        for node in self._running():
            node.connection.link.send("end")
        end = time.monotonic() + KILL_SECONDS + TEARDOWN_SECONDS
        while self._running() and time.monotonic() < end:
            self._faults += self._coordinator.poll()
            time.sleep(POLL_SECONDS)
        for node in self._running():
            self._faults.append(self._coordinator.drop(node, "its processes cannot be killed"))

    def close(self) -> Report:
        """Returns the report of the attempt."""
        reports = [node.report for node in self._started if node.report is not None]
        return Report.merge(reports, ", ".join(self._faults))

    def _running(self) -> list[Node]:
        present = self._coordinator.present
        return [node for node in self._started if node.report is None and any(node is one for one in present)]

    def _has_failed(self) -> bool:
        """Whether some ranks have failed, so that the others wait for them in vain."""
        reports = [node.report for node in self._started if node.report is not None]
        return any(is_failure(report, self._launch.num_ranks) for report in reports)


def is_failure(report: Report, num_ranks: int) -> bool:
    """Whether any of a node's ranks failed or did not report how it ended."""
    codes = [outcome.code for outcome in report.outcomes.values()]
    return (
        bool(report.fault)
        or report.lost_launcher
        or len(codes) < num_ranks
        or any(code not in _SUCCESS_CODES for code in codes)
    )
