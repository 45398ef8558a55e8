"""The worker process on a node: starts the node's launcher, forwards signals, and leaves no process behind.

`launch.run` starts `python -m launch.node_agent NODE LIMIT_SECONDS` through ssh or on its own node; it exchanges
messages with the coordinator over standard input and output. Without ssh, `launch.run` itself is the worker on the
other nodes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launch.errors import EXIT_FAILURE
from launch.supervisor.node_link import HEARTBEAT_SECONDS, Link
from launch.supervisor.requests import Requests
from launch.supervisor.worker import Worker


def main(arguments: Sequence[str]) -> int:
    """Serves the coordinator at the other end of a pipe. Returns the exit code."""
    node, limit_seconds = int(arguments[0]), float(arguments[1])
    requests = Requests()
    requests.listen()
    link = Link(sys.stdin.fileno(), os.dup(sys.stdout.fileno()), lambda: None)
    code = Worker(link, node, limit_seconds - 2 * HEARTBEAT_SECONDS, requests, own_output=False).serve()
    return EXIT_FAILURE if code is None else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
