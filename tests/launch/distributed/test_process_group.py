"""Which device a rank gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.distributed.process_group import local_device
from launch.distributed.topology import Topology
from launch.errors import RunError


def test_a_lone_visible_gpu_is_this_ranks() -> None:
    topology = Topology("torch", 3, 4, 3, 4, 0, "127.0.0.1", 1)
    assert local_device(topology, num_visible=1) == 0
    assert local_device(topology, num_visible=8) == 3
    # The same words from every rank: the preflight prints them once.
    with pytest.raises(RunError, match="4 ranks were started here, but this node has 2 GPUs; start one rank for"):
        local_device(replace(topology, local_rank=0), num_visible=2)
