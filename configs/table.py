"""The reference of all configuration keys: `python -m configs.table > docs/configuration.md` regenerates it."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from configs.load import schema_keys
from configs.schema import Config

INTRODUCTION = """\
# Configuration

Every configuration key with its type, default and meaning. This page is generated from `configs/schema.py`; regenerate
it with `python -m configs.table > docs/configuration.md`.

A run is a YAML file plus `key=value` arguments, which replace keys of the file:

    python train.py configs/debug.yaml optim.lr=1e-3 train.steps=50 'data.sources=[{path: prepared/mine/train}]'

- A value is parsed as YAML. List items are addressed by index: `data.sources.0.path=prepared/mine/train`.
- Unknown keys are errors, and all problems of a configuration are reported together, one per line.
- `null` is a value of its own: the meaning says what it stands for. Sizes that are null and follow from other keys are
  filled in; `python train.py CONFIG.yaml --dry-run` prints the resolved configuration, and every run writes it to
  `config.yaml` in its folder.
- `deepspeed.overrides` takes DeepSpeed keys that tune communication and ZeRO's buffers. A DeepSpeed key that a key of
  this table already sets is refused, and the error names the key to use instead.
- Under `data.sources` and `data.phases`, the keys of a list item are written as `data.sources.path`.
"""


def page() -> str:
    """Returns docs/configuration.md: the introduction, and one table for each section of the configuration."""
    parts = [INTRODUCTION]
    for name, field in Config.model_fields.items():
        assert _is_section(field.annotation)
        parts.append(f"## {name}\n{inspect.getdoc(field.annotation)}\n\n{_table(name)}\n")
    return "\n".join(parts)


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yields (key, type, default, meaning) of every key that is not a section."""
    for key, field in schema_keys():
        if "." in key and not _is_section(field.annotation):
            yield key, _type(field.annotation), _default(field), field.description or ""


def _table(section: str) -> str:
    """Returns the Markdown table of one section's keys."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in rows():
        if key.partition(".")[0] == section:
            cells = (f"`{key}`", kind, f"`{default}`" if default else "required", meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _type(annotation: Any) -> str:
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return " \\| ".join(str(value) for value in arguments).replace("\\|", "|")
    if origin in (types.UnionType, typing.Union):
        return " | ".join(_type(argument) for argument in arguments)
    if annotation is type(None):
        return "null"
    if origin is tuple:
        return "list"
    if origin is dict or _is_section(annotation):
        return "mapping"
    return {str: "text", int: "integer", float: "number", bool: "true | false"}.get(annotation, str(annotation))


def _default(field: Any) -> str:
    if field.default_factory is not None:
        return json.dumps(field.default_factory())
    if field.default is PydanticUndefined:
        return ""
    return json.dumps(field.default)


if __name__ == "__main__":
    print(page(), end="")
