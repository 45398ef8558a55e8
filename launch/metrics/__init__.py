"""What a run records: metrics.jsonl, TensorBoard, warnings, traces."""
