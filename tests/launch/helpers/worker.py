"""Runs several configurations one after the other in one process group: starting DeepSpeed costs seconds.

Usage, under a launcher or alone: `worker.py CASES.json`, where CASES is a list of `[CONFIG.yaml, [key=value, …]]`.
Writes the exit code or error of every case to CASES.json.rank_N. After every finished case the weights that the model
computes with must be the (rounded) fp32 masters, bit for bit.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))

from configs.load import load_config
from data.loader import MicroBatch
from launch.distributed.process_group import leave, start_distributed
from launch.distributed.topology import detect_topology
from launch.engine import engine as engine_module
from launch.engine.engine import Engine
from launch.process.logs import start_screen_log
from tests.conftest import POISON
from train import run

ENGINES: list[Engine] = []
EARLIER: list[weakref.ref[torch.nn.Module]] = []


class RecordedEngine(Engine):
    """An engine that can be looked at when its run is over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ENGINES[:] = [self]
        EARLIER.append(weakref.ref(self.module))

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Gives no finite loss where the poison is among the tokens."""
        objective, cross_entropy, z_loss = super()._forward(micro_batch)
        if (micro_batch.tokens == POISON).any():
            return objective * torch.nan, cross_entropy * torch.nan, z_loss
        return objective, cross_entropy, z_loss


def num_kept_models() -> int:
    """Models of engines that a run has given up and that still take memory."""
    gc.collect()
    return sum(model() is not None for model in EARLIER[:-1])


def differing_copies() -> list[str]:
    """Parameters of the last engine whose working weights on this rank are not the rounded masters."""
    assert ENGINES, "the run has made an engine"
    names = []
    for engine in ENGINES:
        parameters = dict(engine.module.named_parameters())
        for shard in engine.shards():
            parameter = parameters[shard.name]
            sharded = getattr(parameter, "ds_tensor", None)
            if sharded is None:
                working = parameter.detach().flatten()[shard.start : shard.stop]
            else:
                working = sharded.flatten()[: shard.stop - shard.start]
            if not torch.equal(working, shard.master.to(working.dtype)):
                names.append(shard.name)
    return names


def main(cases_path: str) -> None:
    cases = json.loads(Path(cases_path).read_text())
    topology = detect_topology(os.environ)
    start_screen_log(topology.is_main)
    configs = [load_config(path, overrides) for path, overrides in cases]
    device = start_distributed(topology, configs[0])
    outcomes: list[int | str] = []
    engine_module.Engine = RecordedEngine  # type: ignore[misc]
    handlers = list(logging.getLogger("launch").handlers)
    for config in configs:
        EARLIER.clear()
        logging.getLogger("launch").handlers[:] = handlers  # no other case's log.txt
        try:
            outcomes.append(run(config, topology, device))
            differing = differing_copies()
            if torch.autograd._profiler_enabled():
                outcomes[-1] = "a profiler is still running"
            if num_kept_models():
                outcomes[-1] = f"{num_kept_models()} models that the run has given up are still in memory"
            if differing:
                outcomes[-1] = f"working weights differ from the masters: {differing}"
        except (ValueError, RuntimeError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    Path(f"{cases_path}.rank_{topology.rank}").write_text(json.dumps(outcomes))
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
