"""The charts of one data set and budget, drawn with matplotlib.

All of them are as wide, so that their text is of one size, also on a phone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from solo_ext.lab.experiments.results import Place, Results
from solo_ext.lab.experiments.statistics import estimate, mean_of
from solo_ext.lab.experiments.tables import WHOSE
from solo_ext.lab.pages import Figure, chart_style, colour, figure_svg

MOST_LINES = 8
_WIDTH, _HEIGHT, _LINE = 4.5, 2.8, 0.22
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
            drawing = Drawing(figsize=(_WIDTH, 1.3 + 0.4 * len(held)))
            axes = drawing.subplots()
            axes.grid(axis="x")
            for height, (row, values) in enumerate(held.items()):
                drawn = colour(_KINDS[results.kind(place, row)])
                found = estimate(values)
                assert found is not None
                axes.plot(values, [height] * len(values), "o", ms=4, alpha=0.35, color=drawn)
                axes.errorbar(found.mean, height, xerr=found.deviation, fmt="o", color=drawn)
            names = [textwrap.fill(results.label(row), 18, max_lines=2) for row in held]
            axes.set_yticks(range(len(held)), names)
            axes.invert_yaxis()
            axes.set_xlabel(_short(measure))
            kinds = dict.fromkeys(results.kind(place, row) for row in held)
            handles = [
                Line2D([], [], marker="o", ls="", color=colour(_KINDS[kind]), label=WHOSE[kind])
                for kind in kinds
            ]
            drawing.legend(handles=handles, loc="outside upper center", ncols=2)
            figures.append(Figure(f"{measure}: mean, deviation and seeds", figure_svg(drawing)))
    return figures


def curve_figures(results: Results, place: Place, measure: str) -> list[Figure]:
    """For each family of rows, the score over epochs, and over seconds of training."""
    drawn = [row for row in results.rows(place) if results.curve(place, row, measure)]
    levels = {
        row: found.mean
        for row in results.rows(place)
        if results.kind(place, row) == "baseline"
        and (found := mean_of(results, place, row, measure)) is not None
    }
    figures = []
    for family in families(results, drawn):
        for column, over in enumerate(("epochs", "seconds of training")):
            with chart_style():
                drawing, axes = _chart(legend=len(family) + len(levels))
                for row, name in zip(family, _LINES, strict=False):
                    points = results.curve(place, row, measure)
                    # A curve of one point needs a marker to be visible.
                    axes.plot(
                        [point[column] for point in points],
                        [score for *_, score in points],
                        marker="o" if len(points) == 1 else "",
                        color=colour(name),
                        label=_short(results.label(row)),
                    )
                for (row, level), dashes in zip(levels.items(), ("--", ":"), strict=False):
                    label = _short(results.label(row))
                    axes.axhline(level, color=colour("soft"), ls=dashes, lw=1, label=label)
                axes.set(xlabel=over, ylabel=_short(measure))
                drawing.legend(loc="outside lower center")
                names = ", ".join(results.label(row) for row in family)
                figures.append(Figure(f"{names}: over {over}", figure_svg(drawing)))
    return figures


def loss_figures(results: Results, place: Place) -> list[Figure]:
    """For each row, its losses by epoch."""
    figures = []
    for row in results.rows(place):
        losses = list(results.losses(place, row).items())[:MOST_LINES]
        if not losses:
            continue
        with chart_style():
            drawing, axes = _chart()
            for (name, points), line in zip(losses, _LINES, strict=False):
                epochs, values = zip(*points, strict=True)
                axes.plot(epochs, values, color=colour(line), label=_short(name))
            axes.set(xlabel="epochs", ylabel="loss")
            axes.legend()
            figures.append(Figure(results.label(row), figure_svg(drawing)))
    return figures


def families(results: Results, rows: Sequence[str]) -> list[list[str]]:
    """Rows that share a chart: each base with the rows compared with it, and all the others."""
    bases = {row: [r for r in rows if row in results.settings.rows[r].bases] for row in rows}
    found = [[base, *compared] for base, compared in bases.items() if compared]
    shown = {row for family in found for row in family}
    found.append([row for row in rows if row not in shown])
    return [
        family[start : start + MOST_LINES]
        for family in found
        for start in range(0, len(family), MOST_LINES)
    ]


def _chart(legend: int = 0) -> tuple[Drawing, Axes]:
    """Axes over epochs or seconds, with room for a legend of some lines below."""
    drawing = Drawing(figsize=(_WIDTH, _HEIGHT + _LINE * legend))
    axes = drawing.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    return drawing, axes


def _short(text: str) -> str:
    return text if len(text) <= 32 else f"{text[:31]}…"
