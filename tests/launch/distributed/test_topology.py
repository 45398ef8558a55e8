"""The variables of every launcher give the same topology; contradictions name the variables."""

from __future__ import annotations

import pytest

from launch.distributed.topology import Topology, detect_topology, threads_per_rank
from launch.errors import RunError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "1234",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}


def test_plain_python_is_one_rank() -> None:
    topology = detect_topology({})
    assert (topology.rank, topology.world_size, topology.is_main) == (0, 1, True)
    assert 0 < topology.master_port < 65536


def test_torchrun_and_deepspeed_agree() -> None:
    deepspeed = {**TORCHRUN, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
    del deepspeed["LOCAL_WORLD_SIZE"]
    assert detect_topology(deepspeed, local_rank_argument=1) == detect_topology(TORCHRUN)
    assert detect_topology(TORCHRUN).local_world_size == 2


@pytest.mark.parametrize(
    ("rank", "local_rank", "node", "local_world_size"), [(0, 0, 0, 3), (2, 2, 0, 3), (5, 2, 1, 3), (6, 0, 2, 2)]
)
def test_srun(rank: int, local_rank: int, node: int, local_world_size: int) -> None:
    environ = {**SRUN, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank), "SLURM_NODEID": str(node)}
    topology = detect_topology(environ)
    assert topology == Topology("slurm", rank, 8, local_rank, local_world_size, node, "n1", 29500)


def test_nodes() -> None:
    assert detect_topology(TORCHRUN).node == 1
    uneven = {"RANK": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4"}
    assert detect_topology({**TORCHRUN, **uneven, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}).node == 1
    assert detect_topology({}).node == 0


def test_a_launcher_under_srun_takes_precedence() -> None:
    """One torchrun for each of two nodes: srun's tasks are the launchers, not the ranks."""
    tasks = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert detect_topology({**tasks, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}).rank == 3
    assert detect_topology({**tasks, **TORCHRUN, "CROSS_RANK": "1", "CROSS_SIZE": "2"}).world_size == 4


def test_a_shell_in_a_slurm_allocation_is_one_rank() -> None:
    shell = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    assert detect_topology(shell).world_size == 1
    assert detect_topology({**shell, "SLURM_STEP_NUM_TASKS": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK=4 is not in 0..WORLD_SIZE-1 with WORLD_SIZE=4"),
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set; the launcher's variables are incomplete"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set; the launcher's variables are incomplete"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port; expected 1 to 65535"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set; the launcher's variables are incomplete"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set; the launcher's variables are incomplete"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not in 0..LOCAL_WORLD_SIZE-1 with LOCAL_WORLD_SIZE=2"),
        (
            {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": None, "LOCAL_SIZE": "2"},
            "LOCAL_RANK=2 is not in 0..LOCAL_SIZE-1 with LOCAL_SIZE=2",
        ),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 contradicts WORLD_SIZE=4"),
        ({"RANK": "0"}, "LOCAL_RANK=1 contradicts RANK=0"),
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"}, "GROUP_RANK=2 is not in 0..GROUP_WORLD_SIZE-1 with"),
        ({"CROSS_RANK": "2", "CROSS_SIZE": "2"}, "CROSS_RANK=2 is not in 0..CROSS_SIZE-1 with CROSS_SIZE=2"),
        # Set by hand, and passed on to every task of srun.
        (SRUN, "RANK=3 contradicts SLURM_PROCID=5; unset RANK and WORLD_SIZE, since srun's variables suffice"),
        ({**SRUN, "SLURM_PROCID": "3"}, "WORLD_SIZE=4 contradicts SLURM_STEP_NUM_TASKS=8"),
        ({**SRUN, "SLURM_PROCID": "3", "WORLD_SIZE": "8"}, "LOCAL_RANK=1 contradicts SLURM_LOCALID=2"),
    ],
)
def test_incomplete_or_contradicting_variables_are_named(change: dict[str, str | None], message: str) -> None:
    assert message in fault(TORCHRUN, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set; srun does not set it: export MASTER_ADDR (the first node)"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set; srun does not set it"),
        ({"SLURM_PROCID": None}, "SLURM_PROCID is not set"),
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID=8 is not in 0..SLURM_STEP_NUM_TASKS-1 with SLURM_STEP_NUM_TASKS=8"),
        ({"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS='x' is not a whole number"),
        ({"SLURM_NODEID": None}, "SLURM_NODEID is not set"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3 contradicts SLURM_STEP_TASKS_PER_NODE=3(x2),2"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID=3 contradicts SLURM_STEP_TASKS_PER_NODE=3(x2),2 on node 1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, "SLURM_STEP_TASKS_PER_NODE=4(x3) contradicts SLURM_STEP_NUM_TASKS=8"),
        ({"SLURM_STEP_TASKS_PER_NODE": None}, "SLURM_STEP_TASKS_PER_NODE= contradicts SLURM_STEP_NUM_TASKS=8"),
    ],
)
def test_contradictions_of_srun_are_named(change: dict[str, str | None], message: str) -> None:
    assert message in fault(SRUN, change)


def fault(environ: dict[str, str], change: dict[str, str | None]) -> str:
    """Returns the error of an environment with these changes."""
    changed = {key: value for key, value in {**environ, **change}.items() if value is not None}
    with pytest.raises(RunError) as raised:
        detect_topology(changed)
    return str(raised.value)


def test_a_contradicting_local_rank_is_an_error() -> None:
    with pytest.raises(RunError, match="--local_rank=0 contradicts LOCAL_RANK=1"):
        detect_topology(TORCHRUN, local_rank_argument=0)


def test_threads_are_shared_by_the_ranks_of_a_node() -> None:
    assert threads_per_rank({"OMP_NUM_THREADS": "3"}, 2) is None
    whole = threads_per_rank({}, 1)
    assert whole is not None
    assert threads_per_rank({}, 10_000) == 1
    assert threads_per_rank({}, 2) == max(1, whole // 2)
