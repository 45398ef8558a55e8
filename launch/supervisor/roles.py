"""How launch.run supervises: alone on one node, as the coordinator of several, or as one of their workers."""

from __future__ import annotations

import argparse
import os

from configs.errors import ConfigError
from configs.schema import Config
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, RunError
from launch.supervisor.attempt import SPAWN, Launch, count_gpus
from launch.supervisor.node_link import BEAT_SECONDS
from launch.supervisor.node_options import NodeChoice
from launch.supervisor.node_transport import SocketTransport, SshTransport, connect, handed_over
from launch.supervisor.nodes import Nodes
from launch.supervisor.requests import Requests, say, write_line
from launch.supervisor.supervise import Crew, preflight, supervise
from launch.supervisor.worker import Worker

ANSWER_SECONDS = 60.0  # until all nodes have come


def lead(choice: NodeChoice, launch: Launch, config: Config, options: argparse.Namespace, requests: Requests) -> int:
    """The head of several nodes: brings them together, and supervises the run on them. Returns the exit code."""
    assert choice.hosts or choice.master_addr is not None
    if choice.hosts:
        transport: SshTransport | SocketTransport = SshTransport(
            choice.hosts, options.lost_after, handed_over(os.environ)
        )
        names = [host.name for host in choice.hosts]
    else:
        transport = SocketTransport(choice.master_addr or "", choice.port, options.lost_after)
        names = [""] * choice.num_nodes
    nodes = Nodes(names, transport, options.lost_after, requests, say, agreed_on(launch, options), choice.master_addr)
    exit_code = EXIT_FAILURE
    try:
        problems = nodes.gather(ANSWER_SECONDS)
        if requests:
            say("stopped on request")
            exit_code = EXIT_STOPPED
        elif problems:
            for problem in problems:
                write_line(2, f"error: {problem}")
        else:
            say(f"{len(names)} nodes answer: {', '.join(node.name for node in nodes.present)}")
            exit_code = carry_through(nodes, len(names), launch, config, options, requests)
    finally:
        nodes.leave(exit_code)
    return exit_code


def follow(choice: NodeChoice, launch: Launch, options: argparse.Namespace, requests: Requests) -> int:
    """A further node: does what node 0 says. Returns the exit code that node 0 ends with, too."""
    assert choice.master_addr is not None
    while True:
        link = connect(choice.master_addr, choice.port, ANSWER_SECONDS, lambda: bool(requests))
        if link is None:
            break
        limit_seconds = options.lost_after - 2 * BEAT_SECONDS
        agent = Worker(link, choice.node, limit_seconds, requests, True, arguments=agreed_on(launch, options))
        exit_code = agent.serve()
        if exit_code is not None:
            if agent.reason:
                write_line(2, f"error: {agent.reason}")
            else:
                say(f"node 0 has ended the run with code {exit_code}")
            return exit_code
        if not requests:
            say("lost node 0; its ranks here have ended")
    if requests:
        return EXIT_FAILURE if requests.shall_kill else EXIT_STOPPED
    raise RunError(
        f"node {choice.node}: node 0 cannot be reached at {choice.master_addr}:{choice.port} within "
        f"{ANSWER_SECONDS:.0f} s; see whether the command runs there with --node-rank 0, and the firewall"
    )


def agreed_on(launch: Launch, options: argparse.Namespace) -> list[str]:
    """What must be the same on all nodes on which the command is called."""
    settings = [
        f"--launcher {launch.launcher}",
        f"--num-ranks {launch.num_ranks}",
        f"--lost-after {options.lost_after}",
    ]
    return [*launch.arguments, *settings]


def carry_through(
    crew: Crew, num_nodes: int, launch: Launch, config: Config, options: argparse.Namespace, requests: Requests
) -> int:
    """Compares the nodes where that is asked for, or where there are several; then supervises the run."""
    if options.check or (num_nodes > 1 and not options.no_check):
        check = Launch(SPAWN, launch.num_ranks, launch.arguments, "launch.preflight")
        exit_code = preflight(crew, check, num_nodes * launch.num_ranks, requests)
        if options.check or exit_code != EXIT_DONE:
            return exit_code
    return supervise(crew, launch, config, options.max_restarts, requests)


def choose_num_ranks(launcher: str, wanted: int | None) -> int:
    """The number of ranks: as asked for, else one for each GPU, or one on CPU.

    Raises:
        ConfigError: more than there are GPUs, or more than one with `python`.
    """
    if launcher == "python":
        if wanted not in (None, 1):
            raise ConfigError([f"--num-ranks {wanted}: --launcher python starts one rank; use deepspeed or torchrun"])
        return 1
    num_gpus = count_gpus()
    if wanted and num_gpus and wanted > num_gpus:
        raise ConfigError([f"--num-ranks {wanted}: this node shows {num_gpus} GPUs, and every rank needs its own"])
    return wanted or max(1, num_gpus)
