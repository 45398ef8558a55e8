"""Plans a run before it starts: the memory that it needs, and settings that fit."""
