"""A report as pieces, and their Markdown and HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STYLE = (
    "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em;line-height:1.5}img{max-width:100%}"
    "table{border-collapse:collapse;font-size:.85em}td,th{border:1px solid #ccc;padding:.3em .6em;text-align:left}"
    "pre{background:#f4f4f4;padding:.6em}"
)


@dataclass(frozen=True)
class Block:
    """A piece of the report: `heading` (level, text), `text`, `code`, `image` (file, text) or `table` (lines)."""

    kind: str
    text: str = ""
    level: int = 2
    file: str = ""
    lines: tuple[tuple[str, ...], ...] = ()


def markdown(blocks: Sequence[Block]) -> str:
    """The report as Markdown."""
    return "\n\n".join(_MARKDOWN[block.kind](block) for block in blocks) + "\n"


def as_html(blocks: Sequence[Block], title: str) -> str:
    """The report as one HTML page; its figures lie beside it."""
    body = "".join(_HTML[block.kind](block) for block in blocks)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{body}</body></html>\n"
    )


def _markdown_table(block: Block) -> str:
    head, *rows = [[cell.replace("|", r"\|") for cell in line] for line in block.lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def _html_table(block: Block) -> str:
    head, *rows = [[html.escape(cell) for cell in line] for line in block.lines]
    body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
    return f"<table><tr><th>{'</th><th>'.join(head)}</th></tr>{body}</table>"


_MARKDOWN: dict[str, Callable[[Block], str]] = {
    "heading": lambda block: f"{'#' * block.level} {block.text}",
    "text": lambda block: block.text,
    "code": lambda block: f"```yaml\n{block.text}\n```",
    "image": lambda block: f"![{block.text}]({block.file})",
    "table": _markdown_table,
}
_HTML: dict[str, Callable[[Block], str]] = {
    "heading": lambda block: f"<h{block.level}>{html.escape(block.text)}</h{block.level}>",
    "text": lambda block: f"<p>{html.escape(block.text)}</p>",
    "code": lambda block: f"<pre>{html.escape(block.text)}</pre>",
    "image": lambda block: f'<img src="{html.escape(block.file)}" alt="{html.escape(block.text)}">',
    "table": _html_table,
}
