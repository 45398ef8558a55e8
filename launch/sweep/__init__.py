"""Sweeps: runs of one configuration over learning rates and query/key settings, and a report of the results."""
