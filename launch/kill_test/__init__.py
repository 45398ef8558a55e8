"""The test behind launch.chaos: a run that is killed at random must equal an uninterrupted run."""
