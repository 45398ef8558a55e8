"""Reads a checkpoint's master weights in chunks, to limit memory."""

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

_CHUNK_ELEMENTS = 2**21
_ELEMENTS_BEFORE_REOPENING = 2**23


class Masters:
    """Reads the fp32 weights of one checkpoint. A context manager.

    The files are memory-mapped, and pages that were read stay resident. So the files are reopened after every 32 MiB.

    Attributes:
        checkpoint: The checkpoint's folder.
        config, state: The configuration and state of the run in the checkpoint.
        shapes: The shape of every parameter.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: A checkpoint, or a run's folder (its newest checkpoint).

        Raises:
            RunError: There is no checkpoint, it is damaged, or its parameters do not match its model.
        """
        self.checkpoint = find_checkpoint(path)
        faults = find_faults(self.checkpoint)
        if faults:
            raise RunError("; ".join(faults))
        self.config: Config = read_config(self.checkpoint)
        self.shapes: Shapes = parameter_shapes(self.config.model)
        self._reader = CheckpointReader(self.checkpoint)
        self._elements_read = 0
        self.state: TrainingState = self._reader.state
        mismatches = list(parameter_mismatches(self.state.parameters, self.shapes))
        if mismatches:
            raise RunError(f"{self.checkpoint} does not match its model: {'; '.join(mismatches)}")

    def __enter__(self) -> Masters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def read(self, rule: Rule) -> Iterator[Tensor]:
        """Yields a public tensor: in flat chunks if it equals one parameter, else as a whole."""
        if not rule.is_plain:
            yield rule.pack([self._read_whole(part.name) for part in rule.parts])
            return
        name = rule.parts[0].name
        numel = int(torch.Size(self.shapes[name]).numel())
        for start in range(0, numel, _CHUNK_ELEMENTS):
            yield self._read(name, start, min(start + _CHUNK_ELEMENTS, numel))

    def _read_whole(self, name: str) -> Tensor:
        shape = torch.Size(self.shapes[name])
        return self._read(name, 0, shape.numel()).view(shape)

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        if self._elements_read > _ELEMENTS_BEFORE_REOPENING:
            self._reader.__exit__(None, None, None)
            self._reader = CheckpointReader(self.checkpoint)
            self._elements_read = 0
        self._elements_read += stop - start
        values = torch.empty(stop - start)
        self._reader.read_range(MASTER, name, values, start)
        return values
