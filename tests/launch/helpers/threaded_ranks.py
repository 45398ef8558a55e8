"""Ranks as threads of this process, for code that needs of `torch.distributed` only to agree on small objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from launch.distributed import collective


class ThreadedRanks:
    """Stands in for the module `torch.distributed` in `launch.distributed.collective`."""

    DistError = RuntimeError

    def __init__(self, num_ranks: int) -> None:
        self._values: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=20)
        self._local = threading.local()

    def get_rank(self) -> int:
        return int(self._local.rank)

    def get_world_size(self) -> int:
        return len(self._values)

    def all_gather_object(self, values: list[Any], value: Any) -> None:
        self._values[self.get_rank()] = value
        self._barrier.wait()
        values[:] = self._values
        self._barrier.wait()

    def broadcast_object_list(self, values: list[Any], src: int) -> None:
        everyones: list[Any] = [None] * len(self._values)
        self.all_gather_object(everyones, list(values))
        values[:] = everyones[src]

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Calls `function(rank)` on all ranks at once. Returns what each returned or raised."""

        def call(rank: int) -> Any:
            self._local.rank = rank
            try:
                return function(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self._values)) as pool:
            return list(pool.map(call, range(len(self._values))))


def on_ranks(monkeypatch: pytest.MonkeyPatch, num_ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Calls a collective `function(rank)` on ranks that are threads. Returns what each returned or raised."""
    ranks = ThreadedRanks(num_ranks)
    with monkeypatch.context() as patch:
        patch.setattr(collective, "dist", ranks)
        return ranks.run(function)
