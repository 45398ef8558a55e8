"""A run from its start to its last step: data, start, training loop."""
