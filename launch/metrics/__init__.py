"""Metrics of a run: metrics.jsonl, TensorBoard, warnings, profiler traces."""
