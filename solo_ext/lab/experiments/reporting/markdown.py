"""Reports as Markdown of GitHub's flavour."""

from __future__ import annotations

import re
from collections.abc import Sequence

from solo_ext.lab.experiments.reporting.blocks import (
    Block,
    Bullets,
    Figures,
    Heading,
    Paragraph,
    Table,
)

_AT_A_START = re.compile(r"^(\d*)([-+#.)])")
_MEANS_SOMETHING = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)")


def render_markdown(blocks: Sequence[Block]) -> str:
    """The report without its figures."""
    return "\n\n".join(text for block in blocks if (text := _rendered(block))) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MEANS_SOMETHING.sub(lambda found: "\\" + found[0], plain)


def table(given: Table) -> str:
    """Rows of cells; numbers to the right."""
    rule = ["--:" if column in given.numeric else "---" for column in range(len(given.head))]
    lines = [[escaped(cell) for cell in given.head], rule]
    for place, row in enumerate(given.rows):
        lines.append(
            [
                f"**{escaped(cell)}**" if (place, column) in given.bold else escaped(cell)
                for column, cell in enumerate(row)
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rendered(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {escaped(text)}"
        case Paragraph(text):
            return _line(text)
        case Bullets(items):
            return "\n".join(f"- {_line(item)}" for item in items)
        case Table():
            return table(block)
        case Figures():
            return ""


def _line(text: str) -> str:
    """Not a list or a heading because of how it begins."""
    return _AT_A_START.sub(r"\1\\\2", escaped(text))
