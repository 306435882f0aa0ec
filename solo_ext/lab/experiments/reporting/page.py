"""Reports as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from solo_ext.lab.evaluation.page_style import PAGE_STYLE, page
from solo_ext.lab.evaluation.svg import LEGEND_STYLE, SVG_STYLE
from solo_ext.lab.experiments.reporting.blocks import (
    Block,
    Bullets,
    Figure,
    Figures,
    Heading,
    Paragraph,
    Table,
)
from solo_ext.lab.experiments.reporting.charts import CHART_STYLE

_SHORT, _LONG = 12, 24
"""Letters up to which a cell is one line, and beyond which a column has room for several words."""
_STYLE = f"""{PAGE_STYLE}
body {{ max-width: 84rem }}
h3 {{ margin: 1.75rem 0 .4rem; font-size: 1.02rem }}
h4 {{ margin: 1.5rem 0 .3rem; font-size: .95rem }}
nav ul {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.25rem;
  max-width: none }}
a {{ color: var(--plugin) }}
.wide table {{ font-variant-numeric: tabular-nums }}
.wide th, .wide td {{ padding: .3rem .6rem }}
.wide td {{ min-width: 6.75rem; max-width: 26rem }}
.wide .num {{ min-width: 3.25rem }}
.wide .short {{ min-width: 0; white-space: nowrap }}
.wide td.long {{ min-width: 15rem }}
.wide th:first-child {{ padding-left: 0; position: sticky; left: 0; background: var(--page) }}
.wide tbody th {{ min-width: min(11rem, 40vw) }}
.wide tbody th.short {{ min-width: 0 }}
details {{ margin: .75rem 0 }}
summary {{ cursor: pointer; color: var(--soft) }}
.figures {{ display: grid; gap: 1.75rem 2rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(25rem, 100%), 1fr)) }}
{SVG_STYLE}{LEGEND_STYLE}{CHART_STYLE}
@media print {{ body {{ max-width: none; padding: 0; font-size: 10pt }}
  .wide {{ overflow: visible }} tr {{ break-inside: avoid }} nav {{ display: none }}
  h2, h3, h4 {{ break-after: avoid }} }}
"""


def render_page(title: str, blocks: Sequence[Block]) -> str:
    """The page: its headings of the second level are linked at the top."""
    parts, links = [], []
    for place, block in enumerate(blocks):
        match block:
            case Heading(1, text):
                parts.append(f"<h1>{escape(text)}</h1>")
                parts.append("")
            case Heading(level, text):
                anchor = f' id="part-{place}"' if level == 2 else ""
                if level == 2:
                    links.append(f'<li><a href="#part-{place}">{escape(text)}</a></li>')
                parts.append(f"<h{level}{anchor}>{escape(text)}</h{level}>")
            case Paragraph(text, soft):
                css = ' class="soft"' if soft else ""
                parts.append(f"<p{css}>{escape(text)}</p>")
            case Bullets(items):
                parts.append(_bullets(items))
            case Table():
                parts.append(_table(block))
            case Figures(figures):
                drawn = "\n".join(_figure(figure) for figure in figures)
                parts.append(f'<div class="figures">\n{drawn}\n</div>')
    if "" in parts and len(links) > 1:
        parts[parts.index("")] = f"<nav><ul>{''.join(links)}</ul></nav>"
    return page(escape(title), _STYLE, "\n".join(filter(None, parts)))


def _bullets(items: Sequence[str]) -> str:
    listed = "\n".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>\n{listed}\n</ul>"


def _table(table: Table) -> str:
    def css(column: int) -> str:
        if column in table.numeric:
            return ' class="num"'
        letters = max((len(row[column]) for row in table.rows), default=0)
        if letters > _LONG:
            return ' class="long"'
        return ' class="short"' if letters <= _SHORT else ""

    head = "".join(
        f'<th{css(column)} scope="col">{escape(text)}</th>'
        for column, text in enumerate(table.head)
    )
    lines = []
    for place, row in enumerate(table.rows):
        cells = [f'<th{css(0)} scope="row">{escape(row[0])}</th>']
        for column, text in enumerate(row[1:], 1):
            shown = escape(text)
            if (place, column) in table.bold:
                shown = f"<b>{shown}</b>"
            cells.append(f"<td{css(column)}>{shown}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    drawn = (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        f"{chr(10).join(lines)}\n</tbody></table></div>"
    )
    if not table.folded:
        return drawn
    return f"<details><summary>{escape(table.folded)}</summary>\n{drawn}\n</details>"


def _figure(figure: Figure) -> str:
    keys = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{escape(css)}" '
        f'width="10" height="10"/></svg>{escape(text)}</li>'
        for css, text in figure.legend
    )
    legend = f'<ul class="legend">{keys}</ul>' if keys else ""
    return f"<figure><figcaption>{escape(figure.caption)}</figcaption>{figure.svg}{legend}</figure>"
