"""Everything about running: topology, the engine, checkpoints, schedule, metrics, command-line tools."""

from pathlib import Path

PROJECT_ROOT = Path(__file__).parents[1]
