"""The DeepSpeed engine: building the model, one training step, and the report of a step."""
