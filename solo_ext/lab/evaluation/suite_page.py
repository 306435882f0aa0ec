"""The report of a suite: one HTML file that needs only a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from solo_ext.lab.pages import (
    Block,
    Figure,
    Figures,
    Folded,
    Paragraph,
    Section,
    Table,
    render_page,
)

_NAMES = {
    **{"acc1": "top-1", "acc5": "top-5", "map": "mAP", "nmi": "NMI", "ari": "ARI"},
    "ci95": "± (95 %)",
}
"""Names of numbers in headings."""
_FILES = ("picture", "files")


def render_suite(record: Mapping[str, Any], folder: Path) -> str:
    """The page of a record.

    Args:
        record: from :func:`solo_ext.lab.evaluation.suite.evaluate_suite`, complete or not.
        folder: contains the pictures that rows name; they are embedded in the page.
    """
    entries, backbone = record["entries"], record["backbone"]
    kwargs = ", ".join(f"{k} {v}" for k, v in (backbone.get("kwargs") or {}).items())
    trained = "" if record["epoch"] is None else f", {record['epoch']} epochs"
    about = {
        "model": record["run"],
        "weights": f"{record['checkpoint']}{trained} (digest {record['checkpoint_sha256']})",
        "backbone": f"{backbone['name']}{f' ({kwargs})' if kwargs else ''}",
        "train": f"{record['train']['images']:,} images of {record['train']['path']}",
        "test": f"{record['test']['images']:,} images of {record['test']['path']}",
        "view": f"{record['image_size']} x {record['image_size']} pixels",
    }
    remark = (
        "Accuracies and agreement in percent. The backbone is frozen unless the protocol says "
        "otherwise; the test split chooses nothing."
    )
    summary = Table(
        ["Protocol", "Result", "Seconds"],
        [[e["title"], _result(e), f"{e['seconds']:.1f}"] for e in entries],
        numeric=frozenset({2}),
    )
    return render_page(
        f"Evaluation of {record['method'] or record['run']}",
        [
            Section("", [_facts(about)]),
            Section("Summary", [Paragraph(remark, "soft"), summary]),
            *(Section(e["title"], [*_blocks(e, folder)], note=e["protocol"]) for e in entries),
            Section("What ran where", [_facts(record["environment"])]),
        ],
    )


def _facts(facts: Mapping[str, Any]) -> Table:
    return Table([], [[str(k), str(v)] for k, v in facts.items()])


def _result(entry: Mapping[str, Any]) -> str:
    if entry["status"] != "done":
        return f"failed: {entry['error']}"
    numbers = entry["headline"].items()
    return ", ".join(f"{_words(k)} {_cell(float(v))}" for k, v in numbers)


def _blocks(entry: Mapping[str, Any], folder: Path) -> Iterator[Block]:
    if entry["status"] != "done":
        yield Paragraph(entry["error"], "wrong")
        return
    rows: Sequence[Mapping[str, Any]] = entry["results"]
    keys = [k for k in rows[0] if k not in _FILES] if rows else []
    if keys:
        numeric = {i for i, k in enumerate(keys) if any(_is_number(row.get(k)) for row in rows)}
        cells = [[_cell(row.get(k)) for k in keys] for row in rows]
        yield Table([_words(k) for k in keys], cells, numeric=frozenset(numeric))
    figures = [_figure(row, folder) for row in rows if row.get("picture")]
    if figures:
        yield Figures(figures)
    settings = ", ".join(f"{k} {v}" for k, v in (entry["settings"] or {}).items())
    yield Folded("Settings", [Paragraph(settings, "soft")])


def _figure(row: Mapping[str, Any], folder: Path) -> Figure:
    """The picture of a row, if it is a PNG in this folder and no link to another place."""
    name = str(row["picture"])
    file, said = folder / name, [f"{_words(k)} {_cell(row[k])}" for k in row if k not in _FILES]
    own = Path(name).name == name and file.suffix.lower() == ".png" and not file.is_symlink()
    png = file.read_bytes() if own and file.is_file() else b""
    return Figure(", ".join(said) + ("" if png else f" (no picture {name})"), png=png)


def _words(key: str) -> str:
    return " ".join(_NAMES.get(word, word) for word in key.split("_"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # With two decimals, numbers below 1 would lose their meaning.
        return f"{value:.2f}" if abs(value) >= 1 or not value else f"{value:.4g}"
    return str(value)
