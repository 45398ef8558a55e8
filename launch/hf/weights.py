"""Weights of others: a folder of safetensors, or a GGUF file."""

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
# Tables that some old files hold and that are computed here.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


class Weights(Protocol):
    """Tensors by name.

    Attributes:
        shapes: of every tensor.
    """

    shapes: Shapes

    def read(self, name: str) -> Tensor:
        """A tensor in fp32."""


class SafetensorsFolder:
    """`model.safetensors`, or the files that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        """
        Args:
            stack: closes the files at its end.

        Raises:
            RunError: there are none, or one is missing or damaged.
            ConfigError: with a line for every tensor of a type that cannot be read.
        """
        self.shapes: Shapes = {}
        self._files: dict[str, Any] = {}
        problems = []
        for path in _list_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise RunError(f"{path}: is missing") from None
            except (OSError, SafetensorError) as error:
                raise RunError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.endswith(_IGNORED_SUFFIX):
                    continue
                part = file.get_slice(name)
                if part.get_dtype() not in _READABLE_DTYPES:
                    readable = ", ".join(_READABLE_DTYPES)
                    problems.append(f"{path}: {name} has type {part.get_dtype()}; expected one of {readable}")
                self.shapes[name] = tuple(part.get_shape())
                self._files[name] = file
        if problems:
            raise ConfigError(problems)

    def read(self, name: str) -> Tensor:
        """See `Weights`."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(torch.float32)


def _list_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise RunError(f"{folder / INDEX}: has no weight_map")
        return [folder / name for name in sorted(set(map(str, weight_map.values())))]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise RunError(f"{folder}: holds neither {SINGLE} nor {INDEX}; other formats (.bin) are not read")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises RunError when it cannot be read or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: expected a JSON object")
    return content
