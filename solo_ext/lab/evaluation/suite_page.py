"""The report of a suite: one HTML file that needs only a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from solo_ext.lab.evaluation.protocol import is_unchanged
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
    entries = record["entries"]
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
            Section("", [_facts(_about(record))]),
            Section("Summary", [Paragraph(remark, "soft"), summary]),
            *(Section(e["title"], [*_blocks(e, folder)], note=e["protocol"]) for e in entries),
            Section("What ran where", [_facts(record["environment"])]),
        ],
    )


def _about(record: Mapping[str, Any]) -> dict[str, str]:
    backbone = record["backbone"]
    kwargs = ", ".join(f"{k} {v}" for k, v in (backbone.get("kwargs") or {}).items())
    trained = "" if record["epoch"] is None else f", {record['epoch']} epochs"
    return {
        "model": record["run"],
        "weights": f"{record['checkpoint']}{trained} (digest {record['checkpoint_sha256']})",
        "backbone": f"{backbone['name']}{f' ({kwargs})' if kwargs else ''}",
        "train": f"{record['train']['images']:,} images of {record['train']['path']}",
        "test": f"{record['test']['images']:,} images of {record['test']['path']}",
        "view": f"{record['image_size']} x {record['image_size']} pixels",
    }


def _facts(facts: Mapping[str, Any]) -> Table:
    return Table([], [[str(k), str(v)] for k, v in facts.items()])


def _result(entry: Mapping[str, Any]) -> str:
    if entry["status"] != "done":
        return f"failed: {entry['error']}"
    numbers = entry["headline"].items()
    return ", ".join(f"{_words(k)} {_cell(float(v), abs(v) < 1)}" for k, v in numbers)


def _blocks(entry: Mapping[str, Any], folder: Path) -> Iterator[Block]:
    if entry["status"] != "done":
        yield Paragraph(entry["error"], "wrong")
        return
    rows = entry["results"]
    keys = [k for k in rows[0] if k not in _FILES] if rows else []
    if keys:
        yield _table(keys, rows)
    figures = [*_figures(rows, folder, entry.get("files") or {})]
    if figures:
        yield Figures(figures)
    settings = ", ".join(f"{k} {v}" for k, v in (entry["settings"] or {}).items())
    yield Folded("Settings", [Paragraph(settings, "soft")])


def _table(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    numeric = {k for k in keys if any(_is_number(r.get(k)) for r in rows)}
    # With two decimals, numbers below 1 would lose their meaning.
    fine = {k for k in numeric if all(abs(r[k]) < 1 for r in rows if _is_number(r.get(k)))}
    return Table(
        [_words(k) for k in keys],
        [[_cell(row.get(k), k in fine) for k in keys] for row in rows],
        numeric=frozenset(i for i, k in enumerate(keys) if k in numeric),
    )


def _figures(
    rows: Sequence[Mapping[str, Any]], folder: Path, digests: Mapping[str, str | None]
) -> Iterator[Figure]:
    """Pictures that have not changed since the rows were written."""
    for row in rows:
        if row.get("picture"):
            name = str(row["picture"])
            said = [f"{_words(k)} {_cell(v, True)}" for k, v in row.items() if k not in _FILES]
            png = _png(folder, name, digests.get(name))
            yield Figure(", ".join(said) + ("" if png else f" (no picture {name})"), png=png)


def _png(folder: Path, name: str, digest: str | None) -> bytes:
    """A PNG in the folder; a file elsewhere or changed since is not used."""
    file = folder / name
    own = Path(name).name == name and file.suffix.lower() == ".png"
    return file.read_bytes() if own and is_unchanged(file, digest) else b""


def _words(key: str) -> str:
    return " ".join(_NAMES.get(word, word) for word in key.split("_"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any, fine: bool) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if fine else f"{value:.2f}"
    return str(value)
