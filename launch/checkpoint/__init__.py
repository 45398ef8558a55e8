"""Checkpoints: their files, saving, restoring, verifying and pruning."""
