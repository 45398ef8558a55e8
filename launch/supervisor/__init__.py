"""Supervises a run from outside: starts launchers on one or more nodes, forwards signals, and restarts after failures.

Why torchrun's own restarts do not suffice is explained in ARCHITECTURE.md.
"""
