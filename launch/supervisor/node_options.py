"""Chooses the nodes of a run from options, a hostfile or srun's variables, and reports all contradictions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass

from configs.errors import ConfigError
from launch.supervisor.hostfile import Host, read_hostfile

PORT = 29500
LOST_AFTER_SECONDS = 60


@dataclass(frozen=True)
class NodeChoice:
    """The nodes of a run.

    Attributes:
        hosts: The hosts to reach through ssh; empty when the command is run on every node.
        num_nodes, node: When the command is run on every node: the number of nodes, and this node's number.
        master_addr: The address of node 0; None: node 0 reports it.
        port: The port on which node 0 listens for the other nodes.
    """

    hosts: tuple[Host, ...] = ()
    num_nodes: int = 1
    node: int = 0
    master_addr: str | None = None
    port: int = PORT

    @property
    def needs_coordinator(self) -> bool:
        """Whether the run needs a coordinator."""
        return bool(self.hosts) or self.num_nodes > 1


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name the nodes."""
    parser.add_argument(
        "--hostfile", metavar="F", help="run on several nodes through ssh; F has a line `NAME slots=N` for each"
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="number of nodes, when the command is run on each (e.g. by srun)"
    )
    parser.add_argument("--node-rank", type=int, metavar="I", help="with --nodes: number of this node, from 0")
    parser.add_argument("--master-addr", metavar="A", help="address at which the other nodes reach node 0")
    parser.add_argument(
        "--master-port", type=int, metavar="P", help=f"with --nodes: port on which node 0 listens; default: {PORT}"
    )
    parser.add_argument(
        "--lost-after",
        type=float,
        default=LOST_AFTER_SECONDS,
        metavar="S",
        help=f"seconds of silence after which a node counts as lost; default: {LOST_AFTER_SECONDS}",
    )


def choose_nodes(options: argparse.Namespace, environ: Mapping[str, str]) -> NodeChoice:
    """Returns the nodes that the options and, under srun, its variables name.

    Args:
        options: Those of `add_node_arguments`, with `launcher` and `num_ranks`.
        environ: The environment variables.

    Raises:
        ConfigError: One line for each contradiction.
    """
    problems: list[str] = []
    srun = _from_srun(environ, problems) if options.hostfile is None else None
    num_nodes = _agree("--nodes", options.nodes, srun.num_nodes if srun else None, problems)
    node = _agree("--node-rank", options.node_rank, srun.node if srun else None, problems)
    port = options.master_port
    if not 5 <= options.lost_after <= 86400:  # also rejects NaN
        problems.append(f"--lost-after {options.lost_after:g}: expected 5 to 86400 seconds")
    if port is not None and not 0 < port < 65536:
        problems.append(f"--master-port {port}: not a port; expected 1 to 65535")
    if options.launcher == "python" and (options.hostfile or (num_nodes or 1) > 1):
        problems.append("--launcher python starts one process; with several nodes use deepspeed or torchrun")
    if options.hostfile is not None:
        for name in ("nodes", "node_rank", "num_ranks", "master_port"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                problems.append(f"{option} {getattr(options, name)}: cannot be combined with --hostfile")
        try:
            hosts = tuple(read_hostfile(options.hostfile))
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return NodeChoice(hosts=hosts, master_addr=options.master_addr)
    if num_nodes is None:
        for name in ("node_rank", "master_addr", "master_port"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                problems.append(f"{option} {getattr(options, name)}: needs --nodes N, the number of nodes")
    elif num_nodes < 1:
        problems.append(f"--nodes {num_nodes}: expected at least 1")
    elif num_nodes > 1 and node is None:
        problems.append(f"--nodes {num_nodes}: needs --node-rank, this node's number from 0 to {num_nodes - 1}")
    elif node is not None and not 0 <= node < num_nodes:
        problems.append(f"--node-rank {node}: expected 0 to {num_nodes - 1} with --nodes {num_nodes}")
    address = options.master_addr or environ.get("MASTER_ADDR") or (srun.master_addr if srun else None)
    if num_nodes is not None and num_nodes > 1 and not address:
        problems.append(f"--nodes {num_nodes}: needs --master-addr, the address at which the other nodes reach node 0")
    if problems:
        raise ConfigError(problems)
    return NodeChoice((), num_nodes or 1, node or 0, address or None, port or (srun.port if srun else PORT))


def first_of_nodelist(text: str) -> str:
    """Returns the first node of a SLURM node list: `gpu[003-010,12],cpu1` -> `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", text)
    return "" if match is None else match[1] + (match[2] or "")


def _from_srun(environ: Mapping[str, str], problems: list[str]) -> NodeChoice | None:
    """Returns the nodes that srun's variables describe; None if srun has not started several tasks."""
    try:
        num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
        num_nodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
        node, job = int(environ.get("SLURM_NODEID", "0")), int(environ.get("SLURM_JOB_ID", "0"))
    except ValueError as error:
        problems.append(f"SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_NODEID or SLURM_JOB_ID: {error}")
        return None
    if num_tasks < 2:
        return None
    if num_tasks != num_nodes:
        problems.append(
            f"SLURM_STEP_NUM_TASKS={num_tasks} on SLURM_STEP_NUM_NODES={num_nodes} nodes; launch.run starts the ranks "
            "itself: srun --ntasks-per-node=1"
        )
    first = first_of_nodelist(environ.get("SLURM_STEP_NODELIST", ""))
    return NodeChoice((), num_nodes, node, first, 20000 + job % 12000)


def _agree(option: str, given: int | None, found: int | None, problems: list[str]) -> int | None:
    if given is not None and found is not None and given != found:
        problems.append(f"{option} {given} contradicts srun's variables, which say {found}; leave it out")
    return found if given is None else given
