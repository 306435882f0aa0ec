"""Renders reports (sections of paragraphs, tables and figures) as one HTML file or as Markdown.

The HTML file loads no other file and runs no script. Its template is ``page.html.jinja`` beside
this file; jinja2 escapes every text.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True)
class Paragraph:
    """Plain text; the style ``soft`` marks a remark, ``wrong`` an error.

    >>> "not yet" in render_page("Results", [Section("kNN", [Paragraph("not yet", "soft")])])
    True
    """

    text: str
    style: Literal["", "soft", "wrong"] = ""


@dataclass(frozen=True)
class Bullets:
    """A list of plain texts.

    >>> "<li>seed 0</li>" in render_page("Runs", [Section("", [Bullets(["seed 0", "seed 1"])])])
    True
    """

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of plain texts; the first cell of each row names the row.

    ``head`` is empty for a table of names and values. The columns in ``numeric`` are right-aligned;
    ``bold`` holds the (row, column) of the best cells.

    >>> table = Table(["method", "top-1"], [["pcl", "87.5"]], numeric=frozenset({1}))
    >>> "87.5</td>" in render_page("Results", [Section("", [table])])
    True
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    bold: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Figure:
    """A PNG and its caption, which is also its alternative text; without a PNG only the caption.

    >>> Figure("kNN top-1 by epoch", png_of(Drawing(figsize=(2, 1)))).png[1:4]
    b'PNG'
    """

    caption: str
    png: bytes = b""


@dataclass(frozen=True)
class Figures:
    """Figures side by side if the page is wide enough.

    >>> "PCA" in render_page("Maps", [Section("", [Figures([Figure("PCA")])])])
    True
    """

    figures: Sequence[Figure]


Block = Paragraph | Bullets | Table | Figures


@dataclass(frozen=True)
class Section:
    """A heading (none without a title) and its blocks; the top of a page links level 2.

    >>> Section("Results", [Paragraph("top-1: 87.5")]).level
    2
    """

    title: str
    blocks: Sequence[Block] = ()
    level: Literal[2, 3] = 2


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The HTML of a report: its title, and the sections in order.

    >>> "kNN &amp; co" in render_page("Results", [Section("kNN & co")])
    True
    """
    links = [(i, s.title) for i, s in enumerate(sections) if s.level == 2 and s.title]
    return _TEMPLATES.get_template("page.html.jinja").render(
        title=title, sections=sections, links=links if len(links) > 1 else []
    )


def render_markdown(title: str, sections: Sequence[Section]) -> str:
    """The report as GitHub-flavoured Markdown, without its figures.

    >>> render_markdown("Digits", [Section("kNN", [Bullets(["a", "b"])])])
    '# Digits\\n\\n## kNN\\n\\n- a\\n- b\\n'
    """
    parts = [f"# {escaped(title)}"]
    for section in sections:
        if section.title:
            parts.append(f"{'#' * section.level} {escaped(section.title)}")
        parts += filter(None, map(_markdown, section.blocks))
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Paragraph(text):
            return _as_paragraph(text)
        case Bullets(items):
            return "\n".join(f"- {_as_paragraph(item)}" for item in items)
        case Table():
            return markdown_table(block)
    # Only the HTML page has figures.
    return ""


def markdown_table(table: Table) -> str:
    """Markdown of one table.

    >>> print(markdown_table(Table(["Row", "kNN"], [["pcl", "91.5"]], numeric=frozenset({1}))))
    | Row | kNN |
    | --- | --: |
    | pcl | 91.5 |
    """
    rule = ["--:" if column in table.numeric else "---" for column in range(len(table.head))]
    lines = [[escaped(name) for name in table.head], rule]
    for number, row in enumerate(table.rows):
        marks = ["**" if (number, column) in table.bold else "" for column in range(len(row))]
        lines.append([f"{m}{escaped(cell)}{m}" for m, cell in zip(marks, row, strict=True)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Escapes text so that Markdown shows it unchanged, on one line.

    >>> print(escaped("a_b is *not* <b>"))
    a_b is \\*not\\* &lt;b&gt;
    """
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", lambda found: "\\" + found[0], plain)


def _as_paragraph(text: str) -> str:
    """Escapes the text, and a beginning that Markdown would read as a list or a heading."""
    return re.sub(r"^(\d*)([-+#.)])", r"\1\\\2", escaped(text))


def plain_text() -> AbstractContextManager[None]:
    """Context manager: matplotlib draws a dollar sign in a name as it is, not as mathematics.

    >>> with plain_text():
    ...     mpl.rcParams["text.parse_math"]
    False
    """
    return mpl.rc_context({"text.parse_math": False})


def png_of(figure: Drawing) -> bytes:
    """The PNG of a matplotlib figure; equal figures give equal bytes.

    >>> png_of(Drawing(figsize=(2, 1)))[1:4]
    b'PNG'
    """
    written = io.BytesIO()
    with plain_text():
        figure.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "kind": lambda block: type(block).__name__,
    "png_url": lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}",
}
