"""The head's side of a run on several nodes: who answers, one attempt on all of them, and what came of it.

Each node has an agent (`launch.node_agent`) that starts and watches the node's launcher. The head puts together what
they tell, and decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from launch.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, RunError
from launch.supervisor.attempt import KILL_SECONDS, POLL_SECONDS, TEARDOWN_SECONDS, Launch, Place, Report
from launch.supervisor.node_link import Message
from launch.supervisor.node_transport import Line, Transport
from launch.supervisor.requests import Requests

RETRY_SECONDS = 15.0  # for nodes that were lost, before a restart
_FAREWELL_SECONDS = 3.0
_HELLO = {"node", "host", "machine", "address", "port"}  # what an agent says of itself
_GOOD = (EXIT_DONE, EXIT_STOPPED)


@dataclass
class Node:
    """A node whose agent answers.

    Attributes:
        number: among all that the user named.
        name: for messages.
        line: to its agent.
        address: where others reach it.
        port: free there a moment ago.
        machine: the same only where two names stand for one host.
        report: of the attempt that has ended there; None while it runs, or before any.
    """

    number: int
    name: str
    line: Line
    address: str
    port: int
    machine: str
    report: Report | None = None


class Nodes:
    """All nodes of a run.

    Args:
        names: how messages name them.
        transport: to their agents.
        limit_seconds: of silence, after which a node counts as lost.
        requests: the head's; signals to agents are added.
        say: is called with one line for each event.
        arguments: of the run, which those who come by themselves must have been called with as well.
        master_addr: of node 0, where rank 0 listens; None: the address that it tells.
    """

    def __init__(
        self,
        names: Sequence[str],
        transport: Transport,
        limit_seconds: float,
        requests: Requests,
        say: Callable[[str], None],
        arguments: Sequence[str] = (),
        master_addr: str | None = None,
    ) -> None:
        self._names = names
        self._transport = transport
        self._limit_seconds = limit_seconds
        self._requests = requests
        self._say = say
        self._arguments = list(arguments)
        self._master_addr = master_addr
        self._present: dict[int, Node] = {}
        self._waiting: list[Line] = []  # to agents that have not been let in yet

    @property
    def present(self) -> list[Node]:
        """The nodes that answer, in their order."""
        return [self._present[number] for number in sorted(self._present)]

    @property
    def _missing(self) -> list[int]:
        return [number for number in range(len(self._names)) if number not in self._present]

    def gather(self, seconds: float) -> list[str]:
        """Waits for the nodes that are missing, if any. Returns a line for each that is missing still."""
        deadline = time.monotonic() + seconds
        self._waiting += self._transport.start(self._missing)
        words: dict[int, str] = {}
        refusals: dict[int, str] = {}
        while set(self._missing) - set(refusals) and not self._requests and time.monotonic() < deadline:
            if not self._waiting and not self._transport.listens:
                break
            for line in list(self._waiting):
                messages = line.link.take()
                if line.link.is_closed:
                    self._waiting.remove(line)
                    said = line.close()
                    if line.node is not None:
                        words[line.node] = said
                elif messages:
                    self._waiting.remove(line)
                    refusals.update(self._let_in(line, *messages))
            self.look()
            time.sleep(POLL_SECONDS)  # by the next look it shows whether those who just came are there still
        for line in self._waiting:
            line.close()
        self._waiting.clear()
        return [
            refusals.get(number) or self._transport.complain(number, words.get(number, "")) for number in self._missing
        ]

    def reassemble(self) -> None:
        """Before a restart: tries to get lost nodes back.

        Raises:
            RunError: none is left.
        """
        missing = self._missing
        for problem in self.gather(RETRY_SECONDS):
            self._say(f"going on without {problem}")
        for number in set(missing) & set(self._present):
            self._say(f"{self._present[number].name} is back")
        if not self._present and not self._requests:
            raise RunError("no node answers any more")

    def look(self) -> list[str]:
        """Takes the agents' messages. Returns a line for each node that was lost just now.

        A node that comes back meanwhile hears beats from now on, and waits for the next start.
        """
        gone = [line for line in self._waiting if line.node is None and self._is_gone(line)]
        for line in gone:
            self._waiting.remove(line)
            line.close()
        self._waiting += self._transport.arrivals()
        lost = []
        for node in self.present:
            is_closed = node.line.link.is_closed
            for message in node.line.link.take():
                self._hear(node, message)
            silent_seconds = node.line.link.silent_seconds
            if is_closed or silent_seconds > self._limit_seconds:
                lost.append(
                    self.drop(node, "its agent ended" if is_closed else f"no answer for {silent_seconds:.0f} s")
                )
        return lost

    def start(self, launch: Launch) -> NodesAttempt:
        """Starts a launcher on every node that answers."""
        return NodesAttempt(self, launch)

    def place(self, index: int) -> Place:
        """Of the node with that index among those that answer."""
        first = self.present[0]
        chosen = self._master_addr if first.number == 0 else None
        return Place(index, len(self._present), chosen or first.address, first.port)

    def drop(self, node: Node, why: str) -> str:
        """Gives a node up; what is said about it."""
        del self._present[node.number]
        node.line.close()
        words = f"lost {node.name}: {why}"
        self._say(words)
        return words

    def leave(self, exit_code: int) -> None:
        """Lets all agents go; those of other commands end with this exit code."""
        lines = [*(node.line for node in self.present), *self._waiting]
        for line in lines:
            line.link.send("leave", code=exit_code)
        end = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < end and not all(line.link.is_closed for line in lines):
            time.sleep(POLL_SECONDS)
        for line in lines:
            line.close()
        self._transport.close()

    def _is_gone(self, line: Line) -> bool:
        return line.link.is_closed or line.link.silent_seconds > self._limit_seconds

    def _hear(self, node: Node, message: Message) -> None:
        if message["kind"] == "event":
            self._say(f"{node.name}: {message['line']}")
        elif message["kind"] == "request":
            self._requests.add(message["number"], node.name)
        elif message["kind"] == "ended":
            node.report, node.port = Report.from_json(message["report"]), message["port"]

    def _let_in(self, line: Line, hello: Message, *more: Message) -> dict[int, str]:
        """Takes an agent in, or turns it away; then its number, and why in one line."""
        if hello["kind"] != "hello" or not hello.keys() >= _HELLO:
            line.close()
            other = "its agent is of another revision of the project; bring it to the same one"
            return {} if line.node is None else {line.node: f"{self._names[line.node]}: {other}"}
        number = hello["node"]
        refusal = self._refusal(hello)
        if refusal:
            line.link.send("leave", code=EXIT_USAGE, reason=refusal)
            if number in self._missing:
                return {number: refusal}
            self._say(refusal)
            return {}
        name = self._names[number] or f"node {number} ({hello['host']})"
        line.link.send("setup", environ=self._transport.variables)
        node = Node(number, name, line, hello["address"], hello["port"], hello["machine"])
        self._present[number] = node
        for message in more:
            self._hear(node, message)
        return {}

    def _refusal(self, hello: Message) -> str:
        """Why an agent is turned away, in one line; empty where it is not."""
        number, host = hello["node"], hello["host"]
        if number not in self._missing:
            return f"{host}: --node-rank {number} is taken, or not below the {len(self._names)} nodes there are"
        theirs = hello.get("arguments", self._arguments)
        if theirs != self._arguments:
            here = ", ".join(one for one in theirs if one not in self._arguments)
            there = ", ".join(one for one in self._arguments if one not in theirs)
            difference = f"{here or 'nothing'} where node 0 has {there or 'nothing'}"
            return (
                f"{host}: node {number} has {difference if here or there else 'its arguments in another order'}; use "
                "the same command on all (--num-ranks is by default the number of the node's GPUs)"
            )
        # Where each node calls the command, two on one machine were meant to be there; it is also how to try it out.
        twins = [node.name for node in self.present if self._names[number] and node.machine == hello["machine"]]
        if twins:
            return f"{self._names[number]}: is the host {host}, as {twins[0]} is; remove one of them from the hostfile"
        return ""


class NodesAttempt:
    """One start of a launcher on every node; to be used as `launch.supervisor.attempt.Attempt` is."""

    def __init__(self, nodes: Nodes, launch: Launch) -> None:
        self._nodes = nodes
        self._launch = launch
        self._num_signals_sent = 0
        self._faults: list[str] = []
        self._started = nodes.present
        for index, node in enumerate(self._started):
            node.report = None
            node.line.link.send("start", launch=replace(launch, place=nodes.place(index)).to_json())

    def wait(self, requests: Requests) -> None:
        """Returns when the attempt has ended on all nodes that answer, and none of its processes is left there."""
        deadline: float | None = None
        while self._running() and not requests.shall_kill:
            self._faults += self._nodes.look()
            for number in requests[self._num_signals_sent :]:
                for node in self._running():
                    node.line.link.send("signal", number=number)
                self._num_signals_sent += 1
            if deadline is None and self._has_failed():
                deadline = time.monotonic() + TEARDOWN_SECONDS
            # Ranks on a node that was lost can no longer do anything together with the others.
            if self._faults or (deadline is not None and time.monotonic() > deadline):
                break
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kills whatever still runs, and waits until it is gone; gives nodes up that do not say so."""
        for node in self._running():
            node.line.link.send("end")
        end = time.monotonic() + KILL_SECONDS + TEARDOWN_SECONDS
        while self._running() and time.monotonic() < end:
            self._faults += self._nodes.look()
            time.sleep(POLL_SECONDS)
        for node in self._running():
            self._faults.append(self._nodes.drop(node, "its processes cannot be ended"))

    def close(self) -> Report:
        """What came of it."""
        reports = [node.report for node in self._started if node.report is not None]
        return Report.merge(reports, ", ".join(self._faults))

    def _running(self) -> list[Node]:
        present = self._nodes.present
        return [node for node in self._started if node.report is None and any(node is one for one in present)]

    def _has_failed(self) -> bool:
        """Whether the ranks that still run wait in vain for others."""
        reports = [node.report for node in self._started if node.report is not None]
        return any(is_failure(report, self._launch.num_ranks) for report in reports)


def is_failure(report: Report, num_ranks: int) -> bool:
    """Whether a node's ranks did not all end as they should."""
    codes = [outcome.code for outcome in report.outcomes.values()]
    return (
        bool(report.fault) or report.lost_launcher or len(codes) < num_ranks or any(code not in _GOOD for code in codes)
    )
