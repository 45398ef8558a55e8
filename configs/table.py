"""The configuration table of the README: `python -m configs.table` prints it."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from configs.load import schema_keys


def rows() -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key that is not a section."""
    for key, field in schema_keys():
        if "." in key and not _is_section(field.annotation):
            yield key, _type(field.annotation), _default(field), field.description or ""


def markdown() -> str:
    """The table in Markdown."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in rows():
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
    print(markdown())
