"""Any text in a report reads the same in Markdown and HTML as it was written."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from launch.reporting.document import Block, to_html, to_markdown

NAMES = ('a|b<c>&"d"', "it's <script>alert(1)</script>", r"a\|b\\", "&lt;b&gt; &amp;", r"\<br>", "plain")


class Page(HTMLParser):
    """The tags and the text of each element of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.images: list[dict[str, str | None]] = []
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.texts.setdefault(tag, []).append("")
        if tag == "img":
            self.images.append(dict(attributes))

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, text: str) -> None:
        if self._open:
            self.texts[self._open][-1] += text


def report(*names: str) -> list[Block]:
    return [
        Block("heading", names[0], level=1),
        Block("text", names[0]),
        Block("image", names[0], file="figure.png"),
        Block("table", lines=(("", *names), ("row", *names), (*names, "last"))),
        Block("code", "optim:\n  lr: 0.1"),
    ]


def from_markdown(blocks: list[Block]) -> Page:
    return Page(MarkdownIt("commonmark").enable("table").render(to_markdown(blocks)))


@pytest.mark.parametrize("name", NAMES)
def test_names_with_special_characters_keep_their_text(name: str) -> None:
    blocks = report(name, *NAMES)
    expected = [name, *NAMES]
    for page in (from_markdown(blocks), Page(to_html(blocks, title=name))):
        assert page.texts["h1"] == page.texts["p"][:1] == [name]
        assert page.texts["th"] == ["", *expected]
        assert page.texts["td"] == ["row", *expected, *expected, "last"]
        assert page.images == [{"src": "figure.png", "alt": name}]
        assert "script" not in page.texts
    assert Page(to_html(blocks, title=name)).texts["title"] == [name]


@given(st.lists(st.text("ab |<>&\"'\\;/#123", min_size=1).map(str.strip), min_size=2, max_size=4))
def test_cells_of_a_table_keep_their_text(cells: list[str]) -> None:
    blocks = [Block("table", lines=(tuple("x" * len(cells)), tuple(cells)))]
    assert from_markdown(blocks).texts["td"] == cells
    assert Page(to_html(blocks, "")).texts["td"] == cells


def test_markdown_of_every_kind_of_block() -> None:
    assert to_markdown(report("a", "b")) == (
        "# a\n\na\n\n![a](figure.png)\n\n"
        "|  | a | b |\n| --- | --- | --- |\n| row | a | b |\n| a | b | last |\n\n"
        "```yaml\noptim:\n  lr: 0.1\n```\n"
    )


def test_a_line_break_in_a_cell_becomes_a_space() -> None:
    assert to_markdown([Block("table", lines=(("reason",), ("two\nlines",)))]).endswith("| two lines |\n")
