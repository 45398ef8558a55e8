"""Sweeps: many runs of one configuration with other learning rates and query/key settings, and what they show."""
