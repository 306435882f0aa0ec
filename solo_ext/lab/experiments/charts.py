"""The charts of a report: scores of every row, and scores while training."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure as Drawing

from solo_ext.lab.experiments.results import WHOSE, Place, Results, estimate
from solo_ext.lab.pages import Figure, plain_text, png_of

_MOST_LINES = 8
_COLOURS = dict(zip(WHOSE, ("C0", "C1", "C7", "C4"), strict=True))


def score_figures(results: Results, place: Place) -> list[Figure]:
    """For each measure, the seeds of each row with their mean and deviation.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0, 92.0], "simclr": [90.0, 90.5]})
    >>> [figure.caption for figure in score_figures(results, results.places()[0])]
    ['knn: mean, deviation and seeds']
    """
    figures = []
    for measure in results.measures:
        held = {
            row: list(scores.values())
            for row in results.rows(place)
            if (scores := results.scores(place, row, measure))
        }
        if not held:
            continue
        with plain_text():
            # Not wider, so that a phone shows the text at 10 pixels.
            drawing = Drawing(figsize=(4.5, 1.4 + 0.3 * len(held)), layout="constrained")
            axes = drawing.subplots()
            axes.grid(axis="x", alpha=0.3)
            for height, (row, values) in enumerate(held.items()):
                kind, found = results.kind(place, row), estimate(values)
                assert found is not None
                drawn = _COLOURS[kind]
                axes.plot(values, [height] * len(values), "o", ms=4, alpha=0.35, color=drawn)
                mean, deviation = found.mean, found.deviation
                axes.errorbar(mean, height, xerr=deviation, fmt="o", color=drawn, label=WHOSE[kind])
            axes.set_yticks(range(len(held)), [results.label(row) for row in held])
            axes.set_ylim(len(held) - 0.5, -0.5)
            axes.set_xlabel(measure)
            handles, names = axes.get_legend_handles_labels()
            by_kind = dict(zip(names, handles, strict=True))
            drawing.legend(by_kind.values(), by_kind, loc="outside upper center", ncols=2)
            figures.append(Figure(f"{measure}: mean, deviation and seeds", png_of(drawing)))
    return figures


def curve_figures(results: Results, place: Place, measure: str) -> list[Figure]:
    """For each family of rows, the score over epochs, and over seconds of training.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0]})  # without curves
    >>> curve_figures(results, results.places()[0], "knn")
    []
    """
    rows = [row for row in results.rows(place) if results.curve(place, row, measure)]
    levels = {
        row: found.mean
        for row in results.rows(place)
        if results.kind(place, row) == "baseline"
        and (found := results.mean(place, row, measure)) is not None
    }
    figures = []
    for family in _families(results, rows):
        with plain_text():
            drawing = Drawing(figsize=(4.5, 6), layout="constrained")
            both = drawing.subplots(2)
            for column, axes in enumerate(both):
                for row in family:
                    points = results.curve(place, row, measure)
                    x, y = [point[column] for point in points], [score for *_, score in points]
                    axes.plot(x, y, marker=".", label=results.label(row))
                for (row, level), dashes in zip(levels.items(), ("--", ":"), strict=False):
                    axes.axhline(level, color="grey", ls=dashes, label=results.label(row))
                axes.grid(axis="y", alpha=0.3)
                axes.set(xlabel=("epochs", "seconds of training")[column], ylabel=measure)
            drawing.legend(
                *both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
            )
            names = ", ".join(results.label(row) for row in family)
            figures.append(Figure(f"{measure}: {names}", png_of(drawing)))
    return figures


def _families(results: Results, rows: Sequence[str]) -> list[list[str]]:
    """Rows that share a chart: each base with the rows compared with it, and all the others."""
    bases = {row: [r for r in rows if row in results.settings.rows[r].bases] for row in rows}
    found = [[base, *compared] for base, compared in bases.items() if compared]
    shown = {row for family in found for row in family}
    found.append([row for row in rows if row not in shown])
    return [
        family[start : start + _MOST_LINES]
        for family in found
        for start in range(0, len(family), _MOST_LINES)
    ]
