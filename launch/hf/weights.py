"""Weights to import: their interface, and folders of safetensors files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.errors import ConfigError
from launch.errors import RunError
from launch.hf.layouts import Shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_READABLE_DTYPES = ("F32", "BF16", "F16", "F64")
# A table in some old files, which this model computes itself.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


class Weights(Protocol):
    """Tensors by name.

    Attributes:
        shapes: The shape of every tensor.
    """

    shapes: Shapes

    def read(self, name: str) -> Tensor:
        """Reads a tensor as fp32."""


class SafetensorsFolder:
    """`model.safetensors`, or the files that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        """
        Args:
            stack: Closes the files when it exits.

        Raises:
            RunError: There are no files, one is missing or damaged, or it is ambiguous which ones to read.
            ConfigError: With a line for every tensor that is not in the file listed in the index, is in two files, or
                has an unsupported type.
        """
        self.shapes: Shapes = {}
        self._files: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        problems = []
        for path, listed in _list_files(folder).items():
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise RunError(f"{path}: is missing") from None
            except (OSError, SafetensorError) as error:
                raise RunError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
            names = list(file.keys())
            problems += [f"{path}: {name} is missing, but listed in {INDEX}" for name in sorted(listed - set(names))]
            for name in names:
                if name.endswith(_IGNORED_SUFFIX):
                    continue
                part = file.get_slice(name)
                if part.get_dtype() not in _READABLE_DTYPES:
                    readable = ", ".join(_READABLE_DTYPES)
                    problems.append(f"{path}: {name} has type {part.get_dtype()}; expected one of {readable}")
                if name in paths:
                    problems.append(f"{path}: {name} is also in {paths[name].name}")
                paths[name] = path
                self.shapes[name] = tuple(part.get_shape())
                self._files[name] = file
        if problems:
            raise ConfigError(problems)

    def read(self, name: str) -> Tensor:
        """See `Weights`."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(torch.float32)


def _list_files(folder: Path) -> dict[Path, set[str]]:
    """The files, and the tensors that the index lists for each."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file() and single.is_file():
        raise RunError(f"{folder}: has both {SINGLE} and {INDEX}; delete the one that is not the model")
    if single.is_file():
        return {single: set()}
    if not index.is_file():
        raise RunError(f"{folder}: has neither {SINGLE} nor {INDEX}; other formats (.bin) are not supported")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RunError(f"{index}: has no weight_map")
    files: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(folder / str(file), set()).add(name)
    return dict(sorted(files.items()))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises RunError if the file cannot be read or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: expected a JSON object")
    return content
