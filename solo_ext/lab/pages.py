"""Renders reports (sections of texts, tables, pictures and charts) as one HTML file or as Markdown.

The HTML file loads no other file. Only a page with charts has scripts: Vega-Lite and the few lines
of ``page.js``; by its Content-Security-Policy it runs no other script, whatever its texts say. The
template is ``page.html.jinja`` beside this file; jinja2 escapes every text.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure as Drawing

from solo_ext.core.errors import UserError


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


@dataclass(frozen=True)
class Card:
    """A headline number: what it is, its value, and a remark below it.

    >>> Card("Images", "60,000", "32 x 32 pixels").value
    '60,000'
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Cards:
    """Headline numbers side by side. Markdown leaves them out, as tables repeat them.

    >>> "87.5" in render_page("Results", [Section("", [Cards([Card("top-1", "87.5")])])])
    True
    """

    items: Sequence[Card]


@dataclass(frozen=True)
class Picture:
    """A small picture, JPEG, PNG or WebP, its name and a remark; without bytes only the texts.

    >>> Picture("cat/1.png").image
    b''
    """

    name: str
    image: bytes = b""
    note: str = ""


@dataclass(frozen=True)
class Gallery:
    """Pictures in a row that wraps, below a caption; ``lead`` counts the first ones, set apart.

    >>> page = render_page("Dups", [Section("", [Gallery([Picture("a.png", b"x", "0.99")])])])
    >>> "a.png" in page, "0.99" in page
    (True, True)
    """

    pictures: Sequence[Picture]
    caption: str = ""
    lead: int = 0


@dataclass(frozen=True)
class Chart:
    """A chart that reacts to the pointer: a Vega-Lite specification, with its data, and a caption.

    >>> Chart({"mark": "line"}, "Loss by step").caption
    'Loss by step'
    """

    spec: Mapping[str, Any]
    caption: str


@dataclass(frozen=True)
class Charts:
    """Charts side by side if the page is wide enough.

    >>> len(Charts([Chart({"mark": "line"}, "Loss")]).charts)
    1
    """

    charts: Sequence[Chart]


@dataclass(frozen=True)
class Fold:
    """A table that is shown when its title is clicked, and in print.

    >>> fold = Fold("Settings", Table([], [["method", "pcl"]]))
    >>> "<summary>Settings</summary>" in render_page("Run", [Section("", [fold])])
    True
    """

    title: str
    table: Table


Block = Paragraph | Bullets | Table | Figures | Cards | Gallery | Charts | Fold


@dataclass(frozen=True)
class Section:
    """A heading (none without a title) and its blocks; the top of a page links level 2.

    >>> Section("Results", [Paragraph("top-1: 87.5")]).level
    2
    """

    title: str
    blocks: Sequence[Block] = ()
    level: Literal[2, 3] = 2


def render_page(title: str, sections: Sequence[Section], subtitle: str = "") -> str:
    """The HTML of a report: its title, and the sections in order.

    Raises:
        UserError: the page has charts, and what draws them is not installed.

    >>> "kNN &amp; co" in render_page("Results", [Section("kNN & co")])
    True
    """
    parts: list[list[tuple[int, Section]]] = []
    for place, section in enumerate(sections):
        # A section of level 3 stands on the card of the one before it.
        if section.level == 2 or not parts:
            parts.append([])
        parts[-1].append((place, section))
    links = [(i, s.title) for i, s in enumerate(sections) if s.level == 2 and s.title]
    charts = [c for s in sections for b in s.blocks if isinstance(b, Charts) for c in b.charts]
    return _TEMPLATES.get_template("page.html.jinja").render(
        title=title,
        subtitle=subtitle,
        parts=parts,
        links=links if len(links) > 1 else [],
        scripts=_chart_scripts(str(charts[0].spec.get("$schema", ""))) if charts else [],
    )


@cache
def _chart_scripts(schema: str) -> list[tuple[Markup, str]]:
    """The scripts that draw charts of one version of Vega-Lite, and their hashes for the policy."""
    try:
        import vl_convert
    except ModuleNotFoundError:
        raise UserError(
            "vl-convert-python, which draws the charts of a page, is not installed; "
            "pip install 'solo-ext[report]'"
        ) from None
    found = re.search(r"/v(\d+\.\d+)", schema)
    wanted = found[1] if found else None
    held = vl_convert.get_vegalite_versions()
    # Its stub lacks the default of the first argument.
    bundle: Any = vl_convert.javascript_bundle
    library = bundle(vl_version=wanted if wanted in held else None)
    own = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    scripts = []
    for text in (library, own):
        # The browser hashes what it has parsed: lines end with a line feed.
        text = text.replace("\r\n", "\n").replace("</script", "<\\/script")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        scripts.append((Markup(text), f"sha256-{digest}"))
    return scripts


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
        case Fold(title, table):
            return f"{escaped(title)}\n\n{markdown_table(table)}"
    # Only the HTML page has figures, pictures, charts and cards.
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


def data_url(image: bytes) -> str:
    """The address that holds a JPEG, WebP or PNG itself.

    >>> data_url(b"\\xff\\xd8\\xff")
    'data:image/jpeg;base64,/9j/'
    """
    kind = {b"\xff\xd8": "jpeg", b"RI": "webp"}.get(image[:2], "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "kind": lambda block: type(block).__name__,
    "data_url": data_url,
}
# A number that JSON lacks would leave the chart out of the page.
_TEMPLATES.policies["json.dumps_kwargs"] = {"allow_nan": False}
