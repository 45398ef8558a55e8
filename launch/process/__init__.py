"""One training process: requests to stop, the watchdog, logs, and what it tells the supervisor."""
