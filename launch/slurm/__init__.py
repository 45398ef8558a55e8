"""Submits runs as SLURM jobs."""
