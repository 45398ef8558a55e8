"""Every launcher's variables map to the same facts; contradictions name the variables."""

from __future__ import annotations

import pytest

from launch.errors import RunError
from launch.topology import detect_topology, threads_per_rank

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "1234",
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


def test_srun() -> None:
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_NODES": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }
    topology = detect_topology(environ)
    assert (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size) == (5, 8, 1, 4)
    with pytest.raises(RunError, match="MASTER_ADDR is not set"):
        detect_topology({key: value for key, value in environ.items() if key != "MASTER_ADDR"})


def test_a_shell_in_a_slurm_allocation_is_one_rank() -> None:
    shell = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    assert detect_topology(shell).world_size == 1
    assert detect_topology({**shell, "SLURM_STEP_NUM_TASKS": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK=4 is not in"),
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
    ],
)
def test_incomplete_or_wrong_variables_are_named(change: dict[str, str | None], message: str) -> None:
    environ = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(RunError, match=message):
        detect_topology(environ)


def test_a_contradicting_local_rank_is_an_error() -> None:
    with pytest.raises(RunError, match="--local_rank=0 contradicts LOCAL_RANK=1"):
        detect_topology(TORCHRUN, local_rank_argument=0)


def test_threads_are_shared_by_the_ranks_of_a_node() -> None:
    assert threads_per_rank({"OMP_NUM_THREADS": "3"}, 2) is None
    whole = threads_per_rank({}, 1)
    assert whole is not None
    assert threads_per_rank({}, 10_000) == 1
    assert threads_per_rank({}, 2) == max(1, whole // 2)
