"""A run from its start to its last step: data, resuming, the training loop, rollbacks."""
