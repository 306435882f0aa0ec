"""The report of a suite: one HTML file that needs nothing but a browser."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from solo_ext.lab.evaluation.page_style import PAGE_STYLE, page
from solo_ext.lab.evaluation.row_files import is_unchanged

_DASH = "\N{EN DASH}"
_NAMES = {
    **{"acc1": "top-1", "acc5": "top-5", "map": "mAP", "nmi": "NMI", "ari": "ARI"},
    "ci95": "± (95 %)",
}
"""What headings call a number."""
_FILES = ("picture", "page", "files")
_STYLE = f"""{PAGE_STYLE}
h2 small {{ color: var(--soft); font-weight: 400; font-size: .875rem; margin-left: .5rem }}
.wide table {{ min-width: 24rem; font-variant-numeric: tabular-nums }}
.summary {{ width: 100% }}
.summary tbody th {{ min-width: 9rem }}
td:first-child {{ padding-left: 0 }}
.wrong {{ color: var(--wrong) }}
.figures {{ display: grid; gap: 1.5rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)) }}
figure img {{ display: block; max-width: 100%; height: auto; background: #fff; border-radius: 4px }}
figcaption {{ font-weight: 400; font-size: .875rem; color: var(--soft) }}
details {{ font-size: .875rem; color: var(--soft) }}
summary {{ cursor: pointer }}
dl {{ display: flex; flex-wrap: wrap; gap: .1rem 1.25rem; margin: 0 }}
dl div {{ white-space: nowrap }}
dt, dd {{ display: inline; margin: 0 }}
dt {{ color: var(--soft); margin-right: .35rem }}
@media print {{ body {{ max-width: none; padding: 0; font-size: 10.5pt }}
  .wide {{ overflow: visible }} tr {{ break-inside: avoid }}
  h2, h2 + p {{ break-after: avoid }} }}
"""


def render_suite(record: Mapping[str, Any], folder: Path) -> str:
    """The page of a record.

    Args:
        record: of :func:`solo_ext.lab.evaluation.suite.evaluate_suite`, complete or not.
        folder: of the pictures that rows name; they become part of the page.
    """
    title = f"Evaluation of {record['method'] or record['run']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _facts(record),
        _summary(record["entries"]),
        *(_section(entry, folder) for entry in record["entries"]),
        _environment(record["environment"]),
    ]
    return page(escape(title), _STYLE, "\n".join(parts), pictures=True)


def _facts(record: Mapping[str, Any]) -> str:
    backbone = record["backbone"]
    kwargs = ", ".join(f"{k} {v}" for k, v in (backbone.get("kwargs") or {}).items())
    trained = "" if record["epoch"] is None else f", {record['epoch']} epochs"
    facts = {
        "model": record["run"],
        "weights": f"{record['checkpoint']}{trained} (digest {record['checkpoint_sha256']})",
        "backbone": f"{backbone['name']}{f' ({kwargs})' if kwargs else ''}",
        "train": f"{record['train']['images']:,} images of {record['train']['path']}",
        "test": f"{record['test']['images']:,} images of {record['test']['path']}",
        "view": f"{record['image_size']} x {record['image_size']} pixels",
    }
    return _pairs(facts)


def _pairs(facts: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(str(k))}</th><td>{escape(str(v))}</td></tr>'
        for k, v in facts.items()
    )
    return f'<table class="facts"><tbody>\n{rows}\n</tbody></table>'


def _summary(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for entry in entries:
        if entry["status"] == "done":
            found = "".join(
                f"<div><dt>{escape(_words(k))}</dt><dd>{_number(v)}</dd></div>"
                for k, v in entry["headline"].items()
            )
            cell = f"<td><dl>{found}</dl></td>"
        else:
            cell = f'<td class="wrong">failed: {escape(entry["error"])}</td>'
        rows.append(
            f'<tr><th scope="row">{escape(entry["title"])}</th>{cell}'
            f'<td class="num">{entry["seconds"]:.1f}</td></tr>'
        )
    return (
        '<h2>Summary</h2>\n<p class="soft">Accuracies and agreement in percent. The backbone is '
        "frozen unless the protocol says otherwise; the test split chooses nothing.</p>\n"
        '<div class="wide"><table class="summary">\n<thead><tr><th scope="col">Protocol</th>'
        '<th scope="col">Result</th><th class="num" scope="col">Seconds</th></tr></thead>\n'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def _section(entry: Mapping[str, Any], folder: Path) -> str:
    head = f"<h2>{escape(entry['title'])}<small>{escape(entry['protocol'])}</small></h2>"
    if entry["status"] != "done":
        return f'{head}\n<p class="wrong">{escape(entry["error"])}</p>'
    rows = entry["results"]
    keys = [k for k in rows[0] if k not in _FILES] if rows else []
    settings = ", ".join(f"{k} {v}" for k, v in (entry["settings"] or {}).items())
    return "\n".join(
        [
            head,
            _table(keys, rows) if keys else "",
            _figures(rows, folder, entry.get("files") or {}),
            f"<details><summary>Settings</summary><p>{escape(settings)}</p></details>",
        ]
    )


def _table(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    numeric = {k for k in keys if any(_is_number(r.get(k)) for r in rows)}
    fine = {k for k in numeric if _is_fine([r[k] for r in rows if _is_number(r.get(k))])}

    def css(key: str) -> str:
        return ' class="num"' if key in numeric else ""

    head = "".join(f'<th{css(k)} scope="col">{escape(_words(k))}</th>' for k in keys)
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{css(k)}>{escape(_cell(row.get(k), k in fine))}</td>" for k in keys)
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n'
        "</tbody></table></div>"
    )


def _figures(
    rows: Sequence[Mapping[str, Any]], folder: Path, digests: Mapping[str, str | None]
) -> str:
    """Pictures, and names of pages, that are still those that the rows were written with."""
    found = []
    for row in rows:
        label = ", ".join(
            f"{_words(k)} {_cell(v, True)}" for k, v in row.items() if k not in _FILES
        )
        link = row.get("page")
        own = bool(link) and is_unchanged(folder / str(link), digests.get(str(link)))
        note = f"; interactive: {link}" if own else ""
        if row.get("picture"):
            picture = str(row["picture"])
            data = _embedded(folder, picture, digests.get(picture))
            image = f'<img src="{data}" alt="{escape(label)}">' if data else ""
            missing = "" if data else f" (no picture {row['picture']})"
            caption = escape(f"{label}{note}{missing}")
            found.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
        elif note:
            found.append(f"<p>{escape(label + note)}</p>")
    return f'<div class="figures">{"".join(found)}</div>' if found else ""


def _embedded(folder: Path, name: str, digest: str | None) -> str:
    """A PNG of the folder as a data URL; nothing from anywhere else, or written since."""
    file = folder / name
    own = Path(name).name == name and file.suffix.lower() == ".png"
    if not own or not is_unchanged(file, digest):
        return ""
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def _environment(found: Mapping[str, Any]) -> str:
    return f"<h2>What ran where</h2>\n{_pairs(found)}"


def _words(key: str) -> str:
    return " ".join(_NAMES.get(word, word) for word in key.split("_"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_fine(values: Sequence[float]) -> bool:
    """Whether two decimals would hide what the numbers of a column say."""
    return max((abs(v) for v in values), default=0.0) < 1


def _cell(value: Any, fine: bool) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return _DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if fine else f"{value:.2f}"
    return str(value)


def _number(value: float) -> str:
    return escape(_cell(float(value), abs(value) < 1))
