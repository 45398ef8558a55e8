"""A run's folder, as the run and other processes see it; no torch."""
