"""The report of `solo-ext demo`: one HTML file that needs nothing but a browser."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from solo_ext.demo.svg import (
    CLASS_COLOURS,
    DASH,
    FIGURE_STYLE,
    Bar,
    bar_chart,
    loss_chart,
    mean_std,
    scatter,
)
from solo_ext.evaluation.page_style import PAGE_STYLE, page
from solo_ext.evaluation.svg import LEGEND_STYLE

KINDS = {
    "plugin": "method added by solo-ext",
    "host": "method of solo-learn",
    "baseline": "no pretraining",
}

_STYLE = f"""{PAGE_STYLE}
.results {{ width: 100%; min-width: 46rem; font-variant-numeric: tabular-nums }}
.results tbody th {{ min-width: 12rem }}
.figures {{ display: grid; gap: 1.5rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(17rem, 100%), 1fr)) }}
figure {{ max-width: 24rem }}
{LEGEND_STYLE}{FIGURE_STYLE}
@media print {{ body {{ max-width: none; padding: 0; font-size: 10.5pt }}
  .wide {{ overflow: visible }} .results, .bars {{ min-width: 0 }} tr {{ break-inside: avoid }}
  h2, h2 + p {{ break-after: avoid }}
  .figures {{ grid-template-columns: repeat(3, 1fr) }} }}
"""


@dataclass(frozen=True)
class Row:
    """Evaluation of one method; accuracies in percent, nan where there is none.

    Attributes:
        label: Name shown for the method.
        kind: A key of `KINDS`.
        knn: Accuracy of nearest neighbours.
        few_label_mean: Mean accuracy with 10 labels per class.
        few_label_std: Standard deviation of that accuracy.
        linear: Accuracy of a linear classifier on all labels.
        seconds: Time of pretraining, None without pretraining.
        images_per_second: Speed of pretraining, None without pretraining.
        note: Remark shown below the label.
    """

    label: str
    kind: str
    knn: float
    few_label_mean: float
    few_label_std: float
    linear: float
    seconds: float | None
    images_per_second: float | None
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")


@dataclass(frozen=True)
class Curve:
    """Training loss of one method, one value per entry of `epochs`."""

    label: str
    epochs: Sequence[float]
    losses: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.epochs) != len(self.losses):
            raise ValueError(
                f"curve {self.label!r}: {len(self.epochs)} epochs but {len(self.losses)} losses"
            )


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """Features in two dimensions: points of shape (n, 2), targets indexing `class_names`."""

    label: str
    points: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    class_names: Sequence[str]

    def __post_init__(self) -> None:
        count = len(self.targets)
        if self.points.shape != (count, 2):
            raise ValueError(
                f"map {self.label!r}: points must have shape ({count}, 2), not {self.points.shape}"
            )
        if len(self.class_names) > len(CLASS_COLOURS):
            raise ValueError(f"map {self.label!r}: at most {len(CLASS_COLOURS)} classes")
        if count and not (0 <= self.targets.min() <= self.targets.max() < len(self.class_names)):
            raise ValueError(f"map {self.label!r}: a target has no class name")


@dataclass(frozen=True)
class Report:
    """Everything the page shows."""

    title: str
    rows: list[Row]
    curves: list[Curve]
    maps: list[FeatureMap]
    environment: dict[str, str]
    config: dict[str, str]
    notes: list[str]


@dataclass(frozen=True)
class _Column:
    title: str
    value: Callable[[Row], float | None]
    text: Callable[[Row], str]
    smallest_is_best: bool = False


def _number(value: float | None) -> str:
    return f"{value:.1f}" if value is not None and math.isfinite(value) else DASH


_COLUMNS = (
    _Column(
        "10 labels per class",
        lambda row: row.few_label_mean,
        lambda row: mean_std(row.few_label_mean, row.few_label_std),
    ),
    _Column("Linear, all labels", lambda row: row.linear, lambda row: _number(row.linear)),
    _Column("kNN", lambda row: row.knn, lambda row: _number(row.knn)),
    _Column(
        "Pretraining\N{NO-BREAK SPACE}time,\N{NO-BREAK SPACE}s",
        lambda row: row.seconds,
        lambda row: _number(row.seconds),
        True,
    ),
    _Column(
        "Images/s",
        lambda row: row.images_per_second,
        lambda row: _number(row.images_per_second),
    ),
)


def write_report(report: Report, path: Path) -> Path:
    """Writes the report as one HTML file, replacing `path` only once it is complete.

    Args:
        report: What to show.
        path: File to write; missing parent folders are created.

    Returns:
        The path written.
    """
    path = Path(path)
    text = render(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: it would leave the report readable by its owner only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def render(report: Report) -> str:
    """Returns the page as text."""
    rows = sorted(report.rows, key=_rank)
    sections = [
        _summary(report),
        _results(rows),
        _curves(report.curves),
        _maps(report.maps),
        _environment(report.environment),
        _notes(report.notes),
    ]
    return page(escape(report.title), _STYLE, "\n".join(section for section in sections if section))


def _rank(row: Row) -> float:
    return -row.few_label_mean if math.isfinite(row.few_label_mean) else math.inf


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _summary(report: Report) -> str:
    kinds = [row.kind for row in report.rows]
    settings = "; ".join(f"{escape(key)}: {escape(value)}" for key, value in report.config.items())
    return (
        f"<h1>{escape(report.title)}</h1>\n<p>This run evaluated "
        f"{_count(kinds.count('plugin'), 'method', 'methods')} added by solo-ext, "
        f"{_count(kinds.count('host'), 'method', 'methods')} of solo-learn and "
        f"{_count(kinds.count('baseline'), 'baseline', 'baselines')} without pretraining. "
        + (f"Settings: {settings}." if settings else "No settings were recorded.")
        + "</p>"
    )


def _results(rows: Sequence[Row]) -> str:
    if not rows:
        return "<h2>Results</h2>\n<p>No method was evaluated.</p>"
    best = [_best(column, rows) for column in _COLUMNS]
    head = "".join(
        f'<th class="num" scope="col">{escape(column.title)}</th>' for column in _COLUMNS
    )
    body = "\n".join(_result_row(row, best) for row in rows)
    bars = [Bar(row.label, row.kind, row.few_label_mean, row.few_label_std) for row in rows]
    kinds = {row.kind for row in rows}
    keys = ((kind, f"{kind}: {text}") for kind, text in KINDS.items() if kind in kinds)
    return (
        '<h2>Results</h2>\n<p class="soft">Accuracy in percent; ± is one standard deviation. '
        "Bold: best of the pretrained methods in that column.</p>\n"
        '<div class="wide"><table class="results">\n<thead><tr><th scope="col">Method</th>'
        f'<th scope="col">Kind</th>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n'
        "<h2>Accuracy with 10 labels per class</h2>\n"
        f'{_legend(keys)}\n<div class="wide">{bar_chart(bars, "accuracy, %")}</div>'
    )


def _best(column: _Column, rows: Sequence[Row]) -> str | None:
    values = [column.value(row) for row in rows if row.kind != "baseline"]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    return _number(min(finite) if column.smallest_is_best else max(finite))


def _result_row(row: Row, best: Sequence[str | None]) -> str:
    note = f'<span class="sub">{escape(row.note)}</span>' if row.note else ""
    cells = []
    for column, winner in zip(_COLUMNS, best, strict=True):
        text = escape(column.text(row))
        # Compared as shown: of two values that print alike, bold on one only would puzzle.
        if row.kind != "baseline" and _number(column.value(row)) == winner:
            text = f"<b>{text}</b>"
        cells.append(f'<td class="num">{text}</td>')
    return (
        f'<tr><th scope="row">{escape(row.label)}{note}</th><td>{escape(row.kind)}</td>'
        f"{''.join(cells)}</tr>"
    )


def _legend(keys: Iterator[tuple[str, str]]) -> str:
    items = (
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{css}" width="10" '
        f'height="10"/></svg>{escape(text)}</li>'
        for css, text in keys
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _curves(curves: Sequence[Curve]) -> str:
    if not curves:
        return ""
    figures = "\n".join(
        f"<figure><figcaption>{escape(curve.label)}</figcaption>"
        f"{loss_chart(curve.label, curve.epochs, curve.losses)}</figure>"
        for curve in curves
    )
    return (
        '<h2>Training loss</h2>\n<p class="soft">Each method minimises a loss of its own, on its '
        "own scale: the losses of different methods are not comparable. A lower loss does not "
        f'mean better features.</p>\n<div class="figures">\n{figures}\n</div>'
    )


def _maps(maps: Sequence[FeatureMap]) -> str:
    if not maps:
        return ""
    figures = "\n".join(_map_figure(item) for item in maps)
    return (
        '<h2>Features in two dimensions</h2>\n<p class="soft">One point per image, coloured by its '
        "class; the name of a class stands at the median of its points. Axes have no unit, and "
        f'scales differ between maps.</p>\n<div class="figures">\n{figures}\n</div>'
    )


def _map_figure(item: FeatureMap) -> str:
    hidden = int((~np.isfinite(item.points).all(axis=1)).sum())
    text = f"{_count(hidden, 'point', 'points')} without finite coordinates left out"
    warning = f"<small>{text}</small>" if hidden else ""
    keys = ((f"c{index}", name) for index, name in enumerate(item.class_names))
    return (
        f"<figure><figcaption>{escape(item.label)}{warning}</figcaption>"
        f"{scatter(item.label, item.points, item.targets, item.class_names)}"
        f"{_legend(keys)}</figure>"
    )


def _environment(environment: dict[str, str]) -> str:
    if not environment:
        return ""
    body = "\n".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{escape(value)}</td></tr>'
        for key, value in environment.items()
    )
    return f'<h2>What ran where</h2>\n<table class="facts"><tbody>\n{body}\n</tbody></table>'


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h2>Notes</h2>\n<ul>\n{items}\n</ul>"
