"""Runs several configurations one after the other in one process group: starting DeepSpeed costs seconds.

Usage, under a launcher or alone: `worker.py CASES.json`, where CASES is a list of `[CONFIG.yaml, [key=value, …]]`.
Writes the exit code or error of every case to CASES.json.rank_N.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from configs.load import load_config
from launch.engine import leave, start_distributed
from launch.logs import start_screen_log
from launch.topology import detect_topology
from train import run


def main(cases_path: str) -> None:
    cases = json.loads(Path(cases_path).read_text())
    topology = detect_topology(os.environ)
    start_screen_log(topology.is_main)
    configs = [load_config(path, overrides) for path, overrides in cases]
    device = start_distributed(topology, configs[0])
    outcomes: list[int | str] = []
    for config in configs:
        try:
            outcomes.append(run(config, topology, device))
        except (ValueError, RuntimeError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    Path(f"{cases_path}.rank_{topology.rank}").write_text(json.dumps(outcomes))
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
