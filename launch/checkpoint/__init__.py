"""Checkpoints: their files, saving, restoring, and which one a run resumes from."""
