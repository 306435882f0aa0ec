"""Report pages: sections of paragraphs, tables and figures become one HTML file.

The page loads nothing else and runs no script. Its template is ``page.html.jinja`` beside this
file; jinja2 escapes every text. Figures are matplotlib's, drawn in ``COLOURS``, which the page
shows in their light or dark variant.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Drawing

COLOURS = {
    "page": ("#ffffff", "#15181c"),
    "ink": ("#1c2126", "#e4e7ea"),
    "soft": ("#59636e", "#9aa4ae"),
    "rule": ("#d5dade", "#353c44"),
    "wrong": ("#b3261e", "#ff8a80"),
    "plugin": ("#0072b2", "#5fb0e8"),
    "host": ("#d98c00", "#e0a030"),
    "baseline": ("#9aa3ab", "#717b85"),
    "orange": ("#b5480a", "#f0985a"),
    "green": ("#14773f", "#5fc98f"),
    "purple": ("#a3268f", "#ec8fdb"),
    "brown": ("#7a5c00", "#d9bd4a"),
    "teal": ("#00717d", "#4fd0dc"),
    "violet": ("#5b3fb5", "#b6a3ff"),
}
"""Colours for a light and a dark page. Figures are drawn in the first of each pair."""


def colour(name: str) -> str:
    """The colour to draw in; :func:`figure_svg` makes it follow the reader's light or dark setting.

    >>> colour("plugin")
    '#0072b2'
    """
    return COLOURS[name][0]


@dataclass(frozen=True)
class Paragraph:
    """Plain text; ``soft`` marks a remark, ``wrong`` an error."""

    text: str
    style: Literal["", "soft", "wrong"] = ""


@dataclass(frozen=True)
class Bullets:
    """A list of plain texts."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells of plain text; the first of each row names the row.

    Attributes:
        head: names of the columns; empty for a table of names and values.
        rows: cells, one per column.
        numeric: columns that are aligned to the right.
        bold: (row, column) of the best cells.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    bold: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Figure:
    """A drawing from :func:`figure_svg`, or the bytes of a PNG; with neither only a caption.

    Attributes:
        caption: plain text, which screen readers also read out for the drawing.
        svg: from :func:`figure_svg`; any other string is escaped.
        png: content of a PNG file.
    """

    caption: str
    svg: str = ""
    png: bytes = b""


@dataclass(frozen=True)
class Figures:
    """Figures side by side if the page is wide enough."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Folded:
    """Blocks that open when a reader clicks on ``title``."""

    title: str
    blocks: Sequence[Block]


Block = Paragraph | Bullets | Table | Figures | Folded


@dataclass(frozen=True)
class Section:
    """A heading and the blocks below it.

    Attributes:
        title: text of the heading; without a text there is no heading.
        blocks: in order.
        level: level of the heading; those of level 2 are linked at the top of the page.
        note: small text beside the heading.
    """

    title: str
    blocks: Sequence[Block] = ()
    level: Literal[2, 3, 4] = 2
    note: str = ""


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The HTML of a report.

    Args:
        title: plain text; title of the page and its first heading.
        sections: in order.

    >>> page = render_page("Results", [Section("kNN & co", [Paragraph("top-1: 87.5")])])
    >>> "<h1>Results</h1>" in page, "kNN &amp; co" in page
    (True, True)
    """
    links = [(i, s.title) for i, s in enumerate(sections) if s.level == 2 and s.title]
    return _TEMPLATES.get_template("page.html.jinja").render(
        title=title,
        sections=sections,
        links=links if len(links) > 1 else [],
        light={name: pair[0] for name, pair in COLOURS.items()},
        dark={name: pair[1] for name, pair in COLOURS.items()},
    )


def chart_style() -> AbstractContextManager[None]:
    """The style of charts: draw inside the block, and call :func:`figure_svg` there too.

    >>> from matplotlib.figure import Figure
    >>> with chart_style():
    ...     figure = Figure(figsize=(6, 3))
    ...     lines = figure.subplots().plot([1, 2, 3], [70.0, 80.0, 85.0], color=colour("plugin"))
    ...     svg = figure_svg(figure)
    >>> svg.startswith("<svg"), "var(--plugin)" in svg
    (True, True)
    """
    return mpl.rc_context(_STYLE)


def figure_svg(figure: Drawing) -> str:
    """A figure as inline SVG whose ``COLOURS`` follow the page's light or dark setting.

    The background is transparent, text stays text, and equal figures give equal SVG. On a narrow
    page it scrolls sideways instead of shrinking until its text cannot be read.

    Args:
        figure: drawn inside :func:`chart_style`; matplotlib's global state is not used.

    Returns:
        Markup from ``<svg`` to ``</svg>``, which :class:`Figure` takes.
    """
    written = io.StringIO()
    with chart_style():
        FigureCanvasSVG(figure).print_svg(  # type: ignore[no-untyped-call]
            written, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    # matplotlib's style rule is for all elements and would apply to the whole page; the template
    # has the same rule for figures only.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    # One unit of the drawing is a point: text of 11 points shows as 10 to 12 pixels.
    width = 72 * figure.get_figwidth()
    style = f'style="min-width: {0.9 * width:.0f}px; max-width: {1.1 * width:.0f}px"'
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', style, svg, count=1)
    for name, (light, _) in COLOURS.items():
        svg = re.sub(rf"(?<=: ){light}\b", f"var(--{name})", svg)
    return Markup(svg.strip())


def _png_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _kind(block: object) -> str:
    return type(block).__name__


def _column_width(rows: Iterable[Sequence[str]], column: int) -> str:
    """CSS class of a column: one line for up to 12 letters, wider for more than 24."""
    letters = max((len(row[column]) for row in rows), default=0)
    if letters > 24:
        return "long"
    return "short" if letters <= 12 else ""


_STYLE: Any = {
    "axes.edgecolor": colour("soft"),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": colour("soft"),
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    # This font is part of matplotlib, so text has the same size everywhere.
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 11,
    "grid.color": colour("rule"),
    "legend.frameon": False,
    "lines.linewidth": 2,
    "svg.fonttype": "none",
    # Names of clip paths are derived from it; without it they would differ in every call.
    "svg.hashsalt": "solo_ext",
    "text.color": colour("ink"),
    # A dollar in a class name is not mathematics.
    "text.parse_math": False,
    "xtick.color": colour("soft"),
    "ytick.color": colour("soft"),
    "ytick.left": False,
}

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"kind": _kind, "png_url": _png_url, "column_width": _column_width}
