"""The checks behind launch.preflight: facts are collected on each node and compared."""
