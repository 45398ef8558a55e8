"""A report as a list of blocks, and its Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launch.reporting.render import render


@dataclass(frozen=True)
class Block:
    """One part of a report.

    Attributes:
        text: The text of a heading, a paragraph or a code block, or the alternative text of an image.
        level: The level of a heading.
        file: The file of an image, relative to the report.
        lines: The header and the rows of a table.
    """

    kind: Literal["heading", "text", "code", "image", "table"]
    text: str = ""
    level: int = 2
    file: str = ""
    lines: tuple[tuple[str, ...], ...] = ()


def to_markdown(blocks: Sequence[Block]) -> str:
    """Returns the report as Markdown."""
    return render("report.md.j2", blocks=blocks)


def to_html(blocks: Sequence[Block], title: str) -> str:
    """Returns the report as an HTML page."""
    return render("report.html.j2", blocks=blocks, title=title)
