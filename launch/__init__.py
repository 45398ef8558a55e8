"""Runs training: topology, engine, checkpoints, schedule, metrics, supervision, command-line tools."""

from pathlib import Path

PROJECT_ROOT = Path(__file__).parents[1]
