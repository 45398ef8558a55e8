"""What a run will need before it runs: memory, and settings that fit."""
