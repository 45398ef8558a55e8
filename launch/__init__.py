"""Everything about running: topology, engine, schedule, checkpoints, metrics, and the command-line tools."""
