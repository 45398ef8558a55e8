"""Loads a YAML file and `key.sub=value` arguments as a validated, frozen `Config`, or reports all problems at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.checks import find_problems
from configs.errors import ConfigError
from configs.schema import Config, resolve

Tree = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `1e-3` as a number (YAML 1.1 requires `1.0e-3`) and rejects duplicate keys."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> Tree:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a string", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads, merges, validates and resolves a configuration.

    Args:
        path: The YAML file.
        overrides: `key.sub=value` arguments; the value is read as YAML.

    Raises:
        ConfigError: If there are problems; with one line for each.
    """
    tree = read_yaml(path)
    problems: list[str] = []
    for override in overrides:
        try:
            _apply_override(tree, override)
        except ConfigError as error:
            problems += error.problems
    name = Path(path).stem
    if tree.get("run") is None:
        tree["run"] = {}
    if isinstance(tree["run"], dict) and tree["run"].get("name") is None:
        tree["run"]["name"] = name
    # An empty section (`optim:`) has all defaults.
    tree = {key: value for key, value in tree.items() if value is not None or key not in Config.model_fields}
    config, more = _validate(tree)
    if problems or more or config is None:
        raise ConfigError([*problems, *more])
    return resolve(config)


def read_yaml(path: str | Path) -> Tree:
    """Returns the mapping in a YAML file. Raises ConfigError if it cannot be read or is not a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such configuration file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not valid YAML: {_yaml_message(error)}"]) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: expected a mapping of sections, found {type(tree).__name__}"])
    return tree


def to_yaml(config: BaseModel) -> str:
    """Returns the text of a YAML file from which `load_config` reads the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, old value, new value) of every leaf that differs between two trees of plain values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    elif old != new:
        yield prefix, old, new


def leaves(tree: Any, prefix: str = "", whole: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of every leaf of a tree of plain values; lists and the keys in `whole` count as leaves."""
    if isinstance(tree, dict) and tree and prefix not in whole:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else key, whole)
    else:
        yield prefix, tree


def _apply_override(tree: Tree, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError([f"{override!r}: expected key.sub=value"])
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([f"{override!r}: the value is not valid YAML: {_yaml_message(error)}"]) from None
    *parents, leaf = key.split(".")
    node: Any = tree
    for parent in parents:
        if isinstance(node, list):
            node = node[_index(node, parent, key)]
            continue
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, (dict, list)):
            raise ConfigError([f"{key}: {parent} is {node!r}, which has no keys"])
    if isinstance(node, list):
        node[_index(node, leaf, key)] = value
    else:
        node[leaf] = value


def _index(items: list[Any], text: str, key: str) -> int:
    if not text.isdecimal() or int(text) >= len(items):
        raise ConfigError([f"{key}: {text!r} is not a valid index of a list with {len(items)} entries"])
    return int(text)


def _validate(tree: Tree) -> tuple[Config | None, list[str]]:
    """Returns errors of single fields, and problems between keys that do not involve an invalid field.

    Pydantic skips checks after an invalid field, so invalid fields are removed, which leaves their defaults, and the
    rest is validated again before the cross-key checks run.
    """
    try:
        config = Config.model_validate(tree)
        return config, [str(problem) for problem in find_problems(config)]
    except ValidationError as error:
        errors = error.errors()
    locations = [item["loc"] for item in errors]
    # A list with invalid entries is also reported as too short, which is redundant.
    errors = [item for item in errors if not _encloses_another(item["loc"], locations)]
    problems = [_field_problem(item) for item in errors]
    failed = {_dotted(item["loc"]) for item in errors}
    rest = tree
    for item in errors:
        rest = _without(rest, item["loc"], missing=item["type"] == "missing")
    try:
        config = Config.model_validate(rest)
    except ValidationError:
        return None, problems
    problems += [str(problem) for problem in find_problems(config) if not failed.intersection(problem.keys)]
    return None, problems


# Values for invalid required keys, so that the other checks can run; problems that name these keys are dropped.
_PLACEHOLDERS: dict[tuple[str, ...], Any] = {
    ("data",): {"sources": [{"path": "unknown"}]},
    ("data", "sources"): [{"path": "unknown"}],
    ("train",): {"steps": 2**40, "global_batch_tokens": 2**40},
    ("train", "steps"): 2**40,
    ("train", "global_batch_tokens"): 2**40,
}


def _without(tree: Tree, location: tuple[int | str, ...], missing: bool) -> Tree:
    """Returns a copy of the tree without the value at `location`, or with a placeholder if the value is required."""
    if location[0] == "data" and location[1:2] in (("sources",), ("phases",)):
        location = location[:2]
    copy: Tree = dict(tree)
    node: Any = copy
    for key in location[:-1]:
        child = node.get(key)
        if not isinstance(child, dict):
            return copy
        node[key] = dict(child)
        node = node[key]
    placeholder = _PLACEHOLDERS.get(tuple(str(key) for key in location))
    if placeholder is None:
        node.pop(location[-1], None)
    elif missing or location[-1] in node:
        node[location[-1]] = placeholder
    return copy


def _encloses_another(location: Sequence[int | str], locations: Sequence[Sequence[int | str]]) -> bool:
    return any(len(other) > len(location) and other[: len(location)] == location for other in locations)


def _field_problem(error: Any) -> str:
    key = _dotted(error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggestion(key)}"
    if error["type"] == "missing":
        return f"{key}: is required{_meaning(key)}"
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if error["type"] in ("model_type", "dict_type"):
        message = "a mapping of keys"
    elif error["type"] == "string_type":
        message = f"text, in quotes: '\"{error['input']}\"'"
    elif error["type"] in ("tuple_type", "too_short", "too_long"):
        message = message.replace("Tuple should have", "a list with").replace("a valid tuple", "a list")
    return f"{key}: {error['input']!r} is not allowed; expected {message}{_meaning(key)}"


def _dotted(location: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in location)


def schema_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, pydantic field) of every key, including sections, in the schema's order."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield key, field
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                yield from schema_keys(candidate, f"{key}.")


def _meaning(key: str) -> str:
    description = dict(schema_keys())[key].description if key in dict(schema_keys()) else None
    return f" ({description})" if description else ""


def _suggestion(key: str) -> str:
    known = [name for name, _ in schema_keys()]
    leaf = key.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7) or elsewhere[:1]
    if not near:
        leaves = difflib.get_close_matches(leaf, [name.rpartition(".")[2] for name in known], n=1, cutoff=0.75)
        near = [name for name in known if leaves and name.rpartition(".")[2] == leaves[0]][:1]
    if near:
        return f"; did you mean {near[0]}?"
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    return f"; known here: {', '.join(siblings)}" if siblings else ""


def _yaml_message(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + (getattr(error, "problem", None) or str(error)).replace("\n", " ")
