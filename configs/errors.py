"""The error raised for an invalid configuration."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """All problems of a configuration, one readable line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
