"""What the head has on every node: it starts the node's launcher, passes signals on, and leaves no process behind.

`launch.run` starts it, through ssh or beside itself: `python -m launch.node_agent NODE LIMIT_SECONDS` speaks with the
head over its standard input and output. Where no ssh is used, the `launch.run` of every further node becomes one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launch.errors import EXIT_FAILURE
from launch.supervisor.node_link import BEAT_SECONDS, Link
from launch.supervisor.requests import Requests
from launch.supervisor.worker import Worker


def main(arguments: Sequence[str]) -> int:
    """The agent at the other end of a pipe."""
    node, limit_seconds = int(arguments[0]), float(arguments[1])
    requests = Requests()
    requests.listen()
    link = Link(sys.stdin.fileno(), os.dup(sys.stdout.fileno()), lambda: None)
    code = Worker(link, node, limit_seconds - 2 * BEAT_SECONDS, requests, own_output=False).serve()
    return EXIT_FAILURE if code is None else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
