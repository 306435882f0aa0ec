"""The charts of one data set and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from solo_ext.lab.experiments.reporting.blocks import Figure
from solo_ext.lab.experiments.reporting.charts import MOST_LINES, Dots, Line, dot_chart, line_chart
from solo_ext.lab.experiments.reporting.results import Place, Results
from solo_ext.lab.experiments.reporting.statistics import estimate
from solo_ext.lab.experiments.reporting.tables import WHOSE
from solo_ext.lab.experiments.reporting.wording import counted


def score_figures(results: Results, place: Place) -> list[Figure]:
    """For each measure the rows with their seeds and deviation."""
    figures = []
    for measure in results.measures:
        dots = [
            Dots(results.label(row), results.kind(place, row), values, found)
            for row in results.rows(place)
            if (values := list(results.scores(place, row, measure).values()))
            and (found := estimate(values)) is not None
        ]
        if dots:
            kinds = [kind for kind in WHOSE if any(d.kind == kind for d in dots)]
            figures.append(
                Figure(
                    measure,
                    dot_chart(f"{measure} of every row, with its deviation", dots, measure),
                    [(kind, WHOSE[kind]) for kind in kinds],
                )
            )
    return figures


def curve_figures(results: Results, place: Place, measure: str) -> list[Figure]:
    """For each family of rows the score against epochs, and against seconds of training."""
    drawn = [row for row in results.rows(place) if results.curve(place, row, measure)]
    levels = [
        (results.label(row), found.mean)
        for row in results.rows(place)
        if results.kind(place, row) == "baseline"
        and (found := estimate(list(results.scores(place, row, measure).values()))) is not None
    ]
    figures = []
    for family in families(results, drawn):
        title = _title(results, family)
        seeds = [results.curve_seeds(place, row, measure) for row in family]
        legend = [
            (f"s{style}", f"{results.label(row)}, {counted(count, 'seed', 'seeds')}")
            for style, (row, count) in enumerate(zip(family, seeds, strict=True))
        ]
        for axis, x_title in (("epoch", "epochs"), ("seconds", "seconds of training")):
            lines = [
                Line(
                    results.label(row),
                    [
                        (getattr(point, axis), point.score)
                        for point in results.curve(place, row, measure)
                    ],
                    style,
                )
                for style, row in enumerate(family)
            ]
            description = f"{measure} against {x_title}: {title}"
            figures.append(
                Figure(
                    title,
                    line_chart(description, lines, levels, x_title, measure, whole=axis == "epoch"),
                    legend,
                )
            )
    return figures


def loss_figures(results: Results, place: Place) -> list[Figure]:
    """For each row its losses by epoch."""
    figures = []
    for row in results.rows(place):
        losses = list(results.losses(place, row).items())[:MOST_LINES]
        lines = [Line(name, points, style) for style, (name, points) in enumerate(losses)]
        if lines:
            label = results.label(row)
            chart = line_chart(f"loss of {label} by epoch", lines, [], "epochs", "loss", whole=True)
            figures.append(Figure(label, chart))
    return figures


def families(results: Results, rows: Sequence[str]) -> list[list[str]]:
    """Rows that belong on one chart, eight at the most; the one most compared with comes first.

    Rows that bases link share a chart. Where these are too many, each base has one with what is
    compared with it. Rows that are compared with nothing share charts.
    """
    bases = {row: [b for b in results.settings.rows[row].bases if b in rows] for row in rows}
    found: list[list[str]] = []
    alone: list[str] = []
    for linked in _linked(rows, bases):
        ordered = sorted(linked, key=lambda row: -sum(row in bases[other] for other in linked))
        if len(linked) == 1:
            alone += linked
        elif len(linked) <= MOST_LINES:
            found.append([ordered[0], *(row for row in linked if row != ordered[0])])
        else:
            found += _by_base(linked, bases)
    return found + [alone[i : i + MOST_LINES] for i in range(0, len(alone), MOST_LINES)]


def _linked(rows: Sequence[str], bases: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Rows that are compared with one another, directly or through others."""
    group = {row: {row} for row in rows}
    for row, named in bases.items():
        for base in named:
            joined = group[row] | group[base]
            group |= dict.fromkeys(joined, joined)
    first = {min(held, key=rows.index): held for held in group.values()}
    return [[row for row in rows if row in first[head]] for head in rows if head in first]


def _by_base(linked: Sequence[str], bases: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """A base and what is compared with it, without what another such chart shows."""
    found: list[list[str]] = []
    for base in linked:
        compared = [row for row in linked if base in bases[row]]
        found += [
            [base, *compared[start : start + MOST_LINES - 1]]
            for start in range(0, len(compared), MOST_LINES - 1)
        ]
    return [
        family
        for place, family in enumerate(found)
        if not any(
            set(family) < set(other) or (set(family) == set(other) and index < place)
            for index, other in enumerate(found)
        )
    ]


def _title(results: Results, family: Sequence[str]) -> str:
    bases = [
        row for row in family if any(row in results.settings.rows[other].bases for other in family)
    ]
    if not bases:
        return ", ".join(results.label(row) for row in family)
    return f"Rows compared with {' or '.join(results.label(row) for row in bases)}"
