"""The worker process on a node: starts the node's launcher, forwards signals, and leaves no process behind.

`launch.run` starts `python -m launch.node_agent NODE LIMIT_SECONDS` through ssh or on its own node; it exchanges
messages with the coordinator over standard input and output. Without ssh, `launch.run` itself is the worker on the
other nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from launch.errors import EXIT_FAILURE
from launch.supervisor.node_link import HEARTBEAT_SECONDS, Link
from launch.supervisor.requests import Requests
from launch.supervisor.worker import Worker


def main(arguments: Sequence[str]) -> int:
    """Serves the coordinator at the other end of a pipe. Returns the exit code."""
    options = parse_arguments(arguments)
    requests = Requests()
    requests.listen()
    link = Link(sys.stdin.fileno(), os.dup(sys.stdout.fileno()), lambda: None)
    code = Worker(link, options.node, options.limit_seconds - 2 * HEARTBEAT_SECONDS, requests, own_output=False).serve()
    return EXIT_FAILURE if code is None else code


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.node_agent", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("node", type=int, metavar="NODE", help="number of this node")
    parser.add_argument("limit_seconds", type=float, metavar="LIMIT_SECONDS", help="silence that ends the ranks")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
