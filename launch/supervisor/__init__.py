"""Supervising a run from outside: launchers, restarts, many nodes."""
