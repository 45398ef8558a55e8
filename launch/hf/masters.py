"""A checkpoint's master weights, read in pieces so that little of it is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from configs.schema import Config
from launch.checkpoint.files import (
    MASTER,
    CheckpointReader,
    TrainingState,
    find_checkpoint,
    find_faults,
    parameter_mismatches,
    read_config,
)
from launch.errors import RunError
from launch.hf.layouts import Rule, Shapes, parameter_shapes

_PIECE_VALUES = 2**21
_VALUES_BEFORE_REOPENING = 2**23


class Masters:
    """Reads the fp32 weights of one checkpoint; use it as a context manager.

    Its files are mapped into memory, where pages that were read stay. They are closed and opened again after every
    32 MiB.

    Attributes:
        checkpoint: the checkpoint's folder.
        config, state: what it says of the run.
        shapes: of all parameters.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: one checkpoint, or a run's folder (its newest checkpoint).

        Raises:
            RunError: there is no checkpoint, it is damaged, or its parameters are not the model's.
        """
        self.checkpoint = find_checkpoint(path)
        faults = find_faults(self.checkpoint)
        if faults:
            raise RunError("; ".join(faults))
        self.config: Config = read_config(self.checkpoint)
        self.shapes: Shapes = parameter_shapes(self.config.model)
        self._reader = CheckpointReader(self.checkpoint)
        self._values_read = 0
        self.state: TrainingState = self._reader.state
        mismatches = list(parameter_mismatches(self.state.parameters, self.shapes))
        if mismatches:
            raise RunError(f"{self.checkpoint} does not fit its model: {'; '.join(mismatches)}")

    def __enter__(self) -> Masters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def read(self, rule: Rule) -> Iterator[Tensor]:
        """A public tensor in pieces: flat ones where it is one of our parameters as it is, else one piece."""
        if not rule.is_plain:
            yield rule.pack([self._read_whole(part.name) for part in rule.parts])
            return
        name = rule.parts[0].name
        num_values = int(torch.Size(self.shapes[name]).numel())
        for start in range(0, num_values, _PIECE_VALUES):
            yield self._read(name, start, min(start + _PIECE_VALUES, num_values))

    def _read_whole(self, name: str) -> Tensor:
        shape = torch.Size(self.shapes[name])
        return self._read(name, 0, shape.numel()).view(shape)

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        if self._values_read > _VALUES_BEFORE_REOPENING:
            self._reader.__exit__(None, None, None)
            self._reader = CheckpointReader(self.checkpoint)
            self._values_read = 0
        self._values_read += stop - start
        values = torch.empty(stop - start)
        self._reader.read_range(MASTER, name, values, start)
        return values
