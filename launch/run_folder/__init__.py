"""A run's folder: its files, its lock, and what other processes can read from it. No module here imports torch."""
