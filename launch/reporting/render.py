"""Renders the templates of this package with Jinja2."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

# Backslash first, since the other replacements insert one or must not follow one.
_MARKDOWN_ESCAPES = {"\\": r"\\", "&": "&amp;", "<": "&lt;", ">": "&gt;"}


def render(template: str, **values: Any) -> str:
    """Returns the text of a template in `templates/`.

    Values are escaped in `*.html.j2`. A Markdown template escapes with the filters `md` (running text) and `md_cell`
    (a cell of a table).
    """
    environment = Environment(
        loader=PackageLoader("launch.reporting"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": escape_markdown, "md_cell": escape_markdown_cell}
    return environment.get_template(template).render(values)


def escape_markdown(value: object) -> str:
    """Returns text in which nothing reads as an HTML tag, an entity or a backslash escape."""
    text = str(value)
    for character, escaped in _MARKDOWN_ESCAPES.items():
        text = text.replace(character, escaped)
    return text


def escape_markdown_cell(value: object) -> str:
    """Returns `escape_markdown` on one line and without column separators."""
    return " ".join(escape_markdown(value).replace("|", r"\|").splitlines())
