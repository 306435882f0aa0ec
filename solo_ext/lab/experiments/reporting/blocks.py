"""What a report is made of, before it is Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Heading(NamedTuple):
    """A heading; level 1 is the report's own."""

    level: int
    text: str


class Paragraph(NamedTuple):
    """Words; ``soft`` are remarks."""

    text: str
    soft: bool = False


class Bullets(NamedTuple):
    """A list."""

    items: Sequence[str]


class Table(NamedTuple):
    """Cells of plain text.

    Attributes:
        head: of the columns; the first one names the rows.
        rows: cells.
        numeric: columns that are aligned to the right.
        bold: row and column of cells that are the best.
        folded: what stands in place of the table until a reader opens it; empty: it is open.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    bold: frozenset[tuple[int, int]] = frozenset()
    folded: str = ""


class Figure(NamedTuple):
    """A drawing of SVG, with a legend of CSS classes and names."""

    caption: str
    svg: str
    legend: Sequence[tuple[str, str]] = ()


class Figures(NamedTuple):
    """Drawings side by side; Markdown has none."""

    figures: Sequence[Figure]


Block = Heading | Paragraph | Bullets | Table | Figures
