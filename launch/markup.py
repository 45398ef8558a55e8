"""A report as pieces, and their Markdown and HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
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
    parts = []
    for block in blocks:
        if block.kind == "heading":
            parts.append(f"{'#' * block.level} {block.text}")
        elif block.kind == "code":
            parts.append(f"```yaml\n{block.text}\n```")
        elif block.kind == "image":
            parts.append(f"![{block.text}]({block.file})")
        elif block.kind == "table":
            head, *rows = [[cell.replace("|", r"\|") for cell in line] for line in block.lines]
            lines = [head, ["---"] * len(head), *rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        else:
            parts.append(block.text)
    return "\n\n".join(parts) + "\n"


def as_html(blocks: Sequence[Block], title: str) -> str:
    """The report as one HTML page; its figures lie beside it."""
    parts = []
    for block in blocks:
        text = html.escape(block.text)
        if block.kind == "heading":
            parts.append(f"<h{block.level}>{text}</h{block.level}>")
        elif block.kind == "code":
            parts.append(f"<pre>{text}</pre>")
        elif block.kind == "image":
            parts.append(f'<img src="{html.escape(block.file)}" alt="{text}">')
        elif block.kind == "table":
            head, *rows = [[html.escape(cell) for cell in line] for line in block.lines]
            lines = [f"<tr><th>{'</th><th>'.join(head)}</th></tr>"]
            lines += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
            parts.append(f"<table>{''.join(lines)}</table>")
        else:
            parts.append(f"<p>{text}</p>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )
