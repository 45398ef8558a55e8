"""Starts a module's ranks on this node with torchrun's variables. Imports neither torch nor DeepSpeed, prints nothing.

Used for the preflight, which must take only seconds: the other launchers import torch or DeepSpeed first, and print
messages of their own when a rank fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def rank_environment(
    environ: Mapping[str, str], num_ranks: int, node: int, num_nodes: int, local_rank: int
) -> dict[str, str]:
    """Returns the environment of a rank, see `launch.distributed.topology`.

    SLURM's variables are removed: under srun they describe the node's one task, not its ranks.
    """
    return {
        **{name: value for name, value in environ.items() if not name.startswith("SLURM_")},
        "RANK": str(node * num_ranks + local_rank),
        "WORLD_SIZE": str(num_nodes * num_ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(num_nodes),
    }


def spawn(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Starts the ranks, waits for all, and returns the largest of their exit codes.

    Args:
        arguments: Ranks per node, this node's number, number of nodes, address and port of rank 0, and the arguments
            of the Python interpreter.
        environ: The environment to extend.
    """
    num_ranks, node, num_nodes = map(int, arguments[:3])
    master = {"MASTER_ADDR": arguments[3], "MASTER_PORT": arguments[4]}
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments[5:]],
            env={**rank_environment(environ, num_ranks, node, num_nodes, local_rank), **master},
        )
        for local_rank in range(num_ranks)
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(spawn(sys.argv[1:], os.environ))
