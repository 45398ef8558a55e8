"""The roles of launch.run: supervisor of one node, coordinator of several nodes, or worker of a coordinator."""

from __future__ import annotations

import argparse
import os

from configs.errors import ConfigError
from configs.schema import Config
from launch.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, RunError
from launch.supervisor.attempt import SPAWN, Launch, count_gpus
from launch.supervisor.coordinator import Coordinator
from launch.supervisor.node_link import HEARTBEAT_SECONDS
from launch.supervisor.node_options import NodeChoice
from launch.supervisor.node_transport import SocketTransport, SshTransport, connect, forwarded_variables
from launch.supervisor.requests import Requests, log_event, write_line
from launch.supervisor.supervise import Nodes, preflight, supervise
from launch.supervisor.worker import Worker

RENDEZVOUS_SECONDS = 60.0  # for all nodes to connect


def coordinate(
    choice: NodeChoice, launch: Launch, config: Config, options: argparse.Namespace, requests: Requests
) -> int:
    """Connects to the workers of several nodes and supervises the run on them. Returns the exit code."""
    assert choice.hosts or choice.master_addr is not None
    if choice.hosts:
        transport: SshTransport | SocketTransport = SshTransport(
            choice.hosts, options.lost_after, forwarded_variables(os.environ)
        )
        names = [host.name for host in choice.hosts]
    else:
        transport = SocketTransport(choice.master_addr or "", choice.port, options.lost_after)
        names = [""] * choice.num_nodes
    arguments = shared_arguments(launch, options)
    nodes = Coordinator(names, transport, options.lost_after, requests, log_event, arguments, choice.master_addr)
    exit_code = EXIT_FAILURE
    try:
        problems = nodes.wait_for_nodes(RENDEZVOUS_SECONDS)
        if requests:
            log_event("stopped on request")
            exit_code = EXIT_STOPPED
        elif problems:
            for problem in problems:
                write_line(2, f"error: {problem}")
        else:
            log_event(f"{len(names)} nodes connected: {', '.join(node.name for node in nodes.present)}")
            exit_code = check_and_supervise(nodes, len(names), launch, config, options, requests)
    finally:
        nodes.shut_down(exit_code)
    return exit_code


def serve_as_worker(choice: NodeChoice, launch: Launch, options: argparse.Namespace, requests: Requests) -> int:
    """Serves node 0, the coordinator, from another node. Returns the exit code with which node 0 ends, too."""
    assert choice.master_addr is not None
    while True:
        link = connect(choice.master_addr, choice.port, RENDEZVOUS_SECONDS, lambda: bool(requests))
        if link is None:
            break
        limit_seconds = options.lost_after - 2 * HEARTBEAT_SECONDS
        worker = Worker(link, choice.node, limit_seconds, requests, True, arguments=shared_arguments(launch, options))
        exit_code = worker.serve()
        if exit_code is not None:
            if worker.reason:
                write_line(2, f"error: {worker.reason}")
            else:
                log_event(f"node 0 has ended the run with code {exit_code}")
            return exit_code
        if not requests:
            log_event("lost node 0; the ranks on this node have ended")
    if requests:
        return EXIT_FAILURE if requests.must_kill else EXIT_STOPPED
    raise RunError(
        f"node {choice.node}: node 0 cannot be reached at {choice.master_addr}:{choice.port} within "
        f"{RENDEZVOUS_SECONDS:.0f} s; check that the command runs there with --node-rank 0, and the firewall"
    )


def shared_arguments(launch: Launch, options: argparse.Namespace) -> list[str]:
    """Returns the arguments that must be the same on all nodes on which the command is run."""
    settings = [
        f"--launcher {launch.launcher}",
        f"--num-ranks {launch.num_ranks}",
        f"--lost-after {options.lost_after}",
    ]
    return [*launch.arguments, *settings]


def check_and_supervise(
    nodes: Nodes, num_nodes: int, launch: Launch, config: Config, options: argparse.Namespace, requests: Requests
) -> int:
    """Runs the preflight with --check or on several nodes, then supervises the run. Returns the exit code."""
    if options.check or (num_nodes > 1 and not options.no_check):
        check = Launch(SPAWN, launch.num_ranks, launch.arguments, "launch.preflight")
        exit_code = preflight(nodes, check, num_nodes * launch.num_ranks, requests)
        if options.check or exit_code != EXIT_DONE:
            return exit_code
    return supervise(nodes, launch, config, options.max_restarts, requests)


def choose_num_ranks(launcher: str, requested: int | None) -> int:
    """Returns the number of ranks on this node: as requested, else one per GPU, or one on CPU.

    Raises:
        ConfigError: More ranks than GPUs are requested, or more than one with `python`.
    """
    if launcher == "python":
        if requested not in (None, 1):
            raise ConfigError(
                [f"--num-ranks {requested}: --launcher python starts one rank; use deepspeed or torchrun"]
            )
        return 1
    num_gpus = count_gpus()
    if requested and num_gpus and requested > num_gpus:
        raise ConfigError([f"--num-ranks {requested}: this node has {num_gpus} GPUs, and every rank needs its own"])
    return requested or max(1, num_gpus)
