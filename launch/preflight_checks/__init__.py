"""The checks of launch.preflight: what is collected on each node and compared."""
