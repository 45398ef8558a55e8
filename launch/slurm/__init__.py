"""SLURM jobs for a run."""
