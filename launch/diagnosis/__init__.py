"""The offline analysis of attention behind launch.diagnose."""
