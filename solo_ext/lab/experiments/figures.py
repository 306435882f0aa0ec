"""The charts of one data set and budget, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from solo_ext.lab.experiments.results import Place, Results
from solo_ext.lab.experiments.statistics import estimate
from solo_ext.lab.experiments.tables import WHOSE, counted
from solo_ext.lab.pages import Figure, chart_style, colour, figure_svg

MOST_LINES = 8
_KINDS = {"plugin": "plugin", "host": "host", "baseline": "baseline", "teacher": "purple"}
_LINES = ("ink", "plugin", "orange", "green", "purple", "brown", "teal", "violet")
"""Colours of curves; the first is for the row that others are compared with."""


def score_figures(results: Results, place: Place) -> list[Figure]:
    """For each measure, the seeds of each row with their mean and deviation."""
    figures = []
    for measure in results.measures:
        held = {
            row: list(scores.values())
            for row in results.rows(place)
            if (scores := results.scores(place, row, measure))
        }
        if not held:
            continue
        with chart_style():
            drawing = Drawing(figsize=(7, 1 + 0.28 * len(held)))
            axes = drawing.subplots()
            axes.grid(axis="x")
            named: set[str] = set()
            for height, (row, values) in enumerate(held.items()):
                kind = results.kind(place, row)
                found = estimate(values)
                assert found is not None
                axes.plot(values, [height] * len(values), "o", ms=4, alpha=0.35, color=_of(kind))
                axes.errorbar(
                    found.mean,
                    height,
                    xerr=found.deviation,
                    fmt="o",
                    color=_of(kind),
                    label=None if kind in named else WHOSE[kind],
                )
                named.add(kind)
            axes.set_yticks(range(len(held)), [_short(results.label(row)) for row in held])
            axes.invert_yaxis()
            axes.set_xlabel(_short(measure))
            drawing.legend(loc="outside upper center", ncols=len(named))
            figures.append(Figure(f"{measure}: mean, deviation and seeds", figure_svg(drawing)))
    return figures


def curve_figures(results: Results, place: Place, measure: str) -> list[Figure]:
    """For each family of rows, the score over epochs and over seconds of training."""
    drawn = [row for row in results.rows(place) if results.curve(place, row, measure)]
    levels = {
        row: found.mean
        for row in results.rows(place)
        if results.kind(place, row) == "baseline"
        and (found := estimate(list(results.scores(place, row, measure).values()))) is not None
    }
    figures = []
    for family in families(results, drawn):
        with chart_style():
            drawing = Drawing(figsize=(9, 4.2))
            by_epoch, by_seconds = drawing.subplots(1, 2, sharey=True)
            for row, name in zip(family, _LINES, strict=False):
                points = results.curve(place, row, measure)
                seeds = counted(results.curve_seeds(place, row, measure), "seed", "seeds")
                label = f"{_short(results.label(row))}, {seeds}"
                scores = [point.score for point in points]
                for axes, xs in (
                    (by_epoch, [point.epoch for point in points]),
                    (by_seconds, [point.seconds for point in points]),
                ):
                    # A curve of one point needs a marker to be visible.
                    marker = "o" if len(points) == 1 else ""
                    axes.plot(xs, scores, marker=marker, color=colour(name), label=label)
            for (row, level), dashes in zip(levels.items(), ("--", ":"), strict=False):
                for axes in (by_epoch, by_seconds):
                    label = _short(results.label(row))
                    axes.axhline(level, color=colour("soft"), ls=dashes, lw=1, label=label)
            by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True))
            by_epoch.set(xlabel="epochs", ylabel=_short(measure))
            by_seconds.set(xlabel="seconds of training")
            handles, labels = by_epoch.get_legend_handles_labels()
            drawing.legend(handles, labels, loc="outside lower center", ncols=3)
            figures.append(Figure(_title(results, family), figure_svg(drawing)))
    return figures


def loss_figures(results: Results, place: Place) -> list[Figure]:
    """For each row, its losses by epoch."""
    figures = []
    for row in results.rows(place):
        losses = list(results.losses(place, row).items())[:MOST_LINES]
        if not losses:
            continue
        with chart_style():
            drawing = Drawing(figsize=(4.5, 2.8))
            axes: Axes = drawing.subplots()
            for (name, points), line in zip(losses, _LINES, strict=False):
                epochs, values = zip(*points, strict=True)
                axes.plot(epochs, values, color=colour(line), label=_short(name))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel="epochs", ylabel="loss")
            axes.legend()
            figures.append(Figure(results.label(row), figure_svg(drawing)))
    return figures


def families(results: Results, rows: Sequence[str]) -> list[list[str]]:
    """Rows that share a chart, at most eight: a base first, then the rows compared with it.

    A chart is left out if another one shows all its rows; rows without comparisons share charts.
    """
    found: list[list[str]] = []
    for base in rows:
        compared = [row for row in rows if base in results.settings.rows[row].bases]
        found += [[base, *some] for some in _chunks(compared, MOST_LINES - 1)]
    kept = [one for one in found if not any(set(one) < set(other) for other in found)]
    shown = {row for family in kept for row in family}
    return kept + _chunks([row for row in rows if row not in shown], MOST_LINES)


def _chunks(rows: Sequence[str], size: int) -> list[list[str]]:
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def _title(results: Results, family: Sequence[str]) -> str:
    first, *others = family
    if any(first in results.settings.rows[row].bases for row in others):
        return f"Rows compared with {results.label(first)}"
    return ", ".join(results.label(row) for row in family)


def _of(kind: str) -> str:
    return colour(_KINDS[kind])


def _short(text: str) -> str:
    """Shortens a name so that it fits beside an axis."""
    return text if len(text) <= 32 else f"{text[:31]}…"
