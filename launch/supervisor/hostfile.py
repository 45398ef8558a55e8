"""Reads hostfiles in DeepSpeed's format: a line `NAME slots=N` for each host; blank lines and comments are ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError

# Excludes options of ssh, and characters that are special to a shell or to DeepSpeed's own parser.
_LINE = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.:%@-]*)\s+slots=(?P<slots>[1-9]\d{0,4})", re.ASCII)
_MAX_SHOWN = 60  # characters of an invalid line


@dataclass(frozen=True)
class Host:
    """A line of a hostfile.

    Attributes:
        name: The host's name or address, passed to ssh.
        slots: The number of ranks on this host.
    """

    name: str
    slots: int


def read_hostfile(path: str) -> list[Host]:
    """Returns the hosts in the order of the file.

    Raises:
        ConfigError: The file cannot be read or is invalid; one line for each problem.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([f"--hostfile {path}: cannot be read: {reason}"]) from None
    return parse_hostfile(text, path)


def parse_hostfile(text: str, source: str) -> list[Host]:
    """Returns the hosts in the order of the lines.

    Args:
        text: The content of the file.
        source: The file's name, for messages.

    Raises:
        ConfigError: One line for each problem.
    """
    hosts: list[Host] = []
    first_lines: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            shown = content if len(content) <= _MAX_SHOWN else f"{content[:_MAX_SHOWN]}…"
            problems.append(f"{source}:{number}: {shown!r} is not `NAME slots=N`, e.g. `gpu-node-1 slots=8`")
        elif match["name"] in first_lines:
            name = match["name"]
            problems.append(f"{source}:{number}: {name} is already in line {first_lines[name]}; remove one of them")
        else:
            first_lines[match["name"]] = number
            hosts.append(Host(match["name"], int(match["slots"])))
    for host in hosts[1:]:
        if host.slots != hosts[0].slots:
            problems.append(
                f"{source}:{first_lines[host.name]}: {host.name} has {host.slots} slots and {hosts[0].name} has "
                f"{hosts[0].slots}; every host must have the same number of ranks"
            )
    if not hosts and not problems:
        problems.append(f"{source}: has no hosts; expected a line `NAME slots=N` for each")
    if problems:
        raise ConfigError(problems)
    return hosts
