"""What runs inside each training process: requests to stop, the watchdog, logs, and reports to the supervisor."""
