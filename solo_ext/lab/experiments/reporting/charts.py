"""Inline SVG charts of a benchmark: curves of several rows, and scores with their deviation.

Drawn 440 units wide, so that text is legible where two stand side by side and on a telephone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from solo_ext.lab.evaluation.svg import nice_ticks, svg_line, svg_open, svg_text, tick_labels
from solo_ext.lab.experiments.reporting.statistics import Estimate
from solo_ext.lab.experiments.reporting.wording import mean_and_deviation

MOST_LINES = 8
LIGHT = ("#1c2126", "#0072b2", "#b5480a", "#14773f", "#a3268f", "#7a5c00", "#00717d", "#5b3fb5")
DARK = ("#e4e7ea", "#5fb0e8", "#f0985a", "#5fc98f", "#ec8fdb", "#d9bd4a", "#4fd0dc", "#b6a3ff")
"""Colours of lines, the first one of the row that others are compared with."""
_DASHES = ("", "", "", "", "", "7 3", "2 3", "8 3 2 3")


def _variables(colours: Sequence[str]) -> str:
    return " ".join(f"--s{place}: {colour};" for place, colour in enumerate(colours))


CHART_STYLE = (
    f":root {{ {_variables(LIGHT)} }}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
    """\
.chart { font-size: 12px }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
.line.s0 { stroke-width: 3 }
.leader { stroke-width: 1; stroke-opacity: .45 }
.leader.label { stroke: var(--soft) }
.level { stroke: var(--soft); stroke-dasharray: 3 4 }
.seed { fill-opacity: .35 }
.teacher { fill: var(--s4) }
"""
    + "\n".join(
        f".line.s{i}, .leader.s{i} {{ stroke: var(--s{i}) }} "
        f"svg .name.s{i}, rect.s{i} {{ fill: var(--s{i}) }}"
        + (f" .line.s{i} {{ stroke-dasharray: {dash} }}" if dash else "")
        for i, dash in enumerate(_DASHES)
    )
)
_WIDTH = 440.0


class Line(NamedTuple):
    """A curve: points in the order of x; ``style`` is a place in the colours."""

    label: str
    points: Sequence[tuple[float, float]]
    style: int


class Dots(NamedTuple):
    """A row of a chart of scores: its seeds, their mean and deviation."""

    label: str
    kind: str
    values: Sequence[float]
    estimate: Estimate


class _Name(NamedTuple):
    css: str
    text: str
    at: tuple[float, float]


def line_chart(
    description: str,
    lines: Sequence[Line],
    levels: Sequence[tuple[str, float]],
    x_title: str,
    y_title: str,
    whole: bool = False,
) -> str:
    """Draws curves, each named where it ends.

    Args:
        description: for who cannot see it.
        lines: at least one, none without points.
        levels: names and values of what has no curve.
        x_title: of the horizontal axis.
        y_title: of the vertical axis.
        whole: the horizontal axis counts.
    """
    left, right, top, bottom = 48.0, _WIDTH - 128, 24.0, 232.0
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [y for _, y in levels]
    x_ticks = nice_ticks(min(xs), max(xs), whole=whole)
    y_ticks = nice_ticks(min(ys), max(ys))
    last = max(xs)
    # Room beyond the last point would be taken from the curves.
    x_low, x_high = x_ticks[0], last if last > x_ticks[0] else x_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return left + (right - left) * across, bottom - (bottom - top) * up

    parts = [svg_open("chart", _WIDTH, bottom + 44, description)]
    parts.append(svg_text("label", 4, 13, y_title))
    for tick, text in zip(y_ticks, tick_labels(y_ticks), strict=True):
        y = place(x_low, tick)[1]
        parts.append(svg_line("grid", left, y, right, y))
        parts.append(svg_text("tick end", left - 7, y + 4, text))
    for tick, text in zip(x_ticks, tick_labels(x_ticks), strict=True):
        if tick <= x_high:
            x = place(tick, y_ticks[0])[0]
            parts.append(svg_line("axis", x, bottom, x, bottom + 4))
            parts.append(svg_text("tick mid", x, bottom + 18, text))
    parts.append(svg_line("axis", left, bottom, right, bottom))
    parts.append(svg_text("label mid", (left + right) / 2, bottom + 37, x_title))
    names = []
    for name, value in levels:
        y = place(x_low, value)[1]
        parts.append(svg_line("level", left, y, right, y))
        names.append(_Name("label", name, (right, y)))
    # The row that the others are compared with lies on top.
    for line in sorted(lines, key=lambda drawn: -drawn.style):
        points = [place(x, y) for x, y in line.points]
        parts.append(_path(line, points))
        names.append(_Name(f"s{line.style}", line.label, points[-1]))
    parts += _named(names, right + 12, top, bottom)
    return "".join([*parts, "</svg>"])


def _path(line: Line, points: Sequence[tuple[float, float]]) -> str:
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    # With round caps a line without length is a dot.
    lone = "h0" if len(points) == 1 else ""
    end = line.points[-1][1]
    return (
        f'<path class="line s{line.style}" d="M{steps}{lone}">'
        f"<title>{escape(line.label)}: {end:.2f} at the end</title></path>"
    )


def _named(names: Sequence[_Name], x: float, top: float, bottom: float) -> Iterator[str]:
    """Names to the right of the curves' ends, moved apart where they would overlap."""
    pitch = min(14.0, (bottom - top) / max(len(names), 1))
    ordered = sorted(names, key=lambda name: name.at[1])
    spots: list[float] = []
    for name in ordered:
        spots.append(max(name.at[1], spots[-1] + pitch if spots else top))
    # Pushed below the chart: back up from its end.
    limit = bottom
    for index in range(len(spots) - 1, -1, -1):
        spots[index] = min(spots[index], limit)
        limit = spots[index] - pitch
    for name, y in zip(ordered, spots, strict=True):
        yield svg_line(f"leader {name.css}", *name.at, x - 3, y)
        yield (
            f"<g><title>{escape(name.text)}</title>"
            f"{svg_text(f'name {name.css}', x, y + 4, shortened(name.text, 17))}</g>"
        )


def dot_chart(description: str, rows: Sequence[Dots], x_title: str) -> str:
    """Draws the mean of each row with one deviation to both sides, and its seeds."""
    longest = max(min(len(row.label), 22) for row in rows)
    left, right, pitch, top = 12 + 6.8 * longest, _WIDTH - 100, 21.0, 6.0
    bottom = top + pitch * len(rows)
    ends = [v for row in rows for v in row.values]
    for row in rows:
        deviation = row.estimate.deviation or 0.0
        ends += [row.estimate.mean - deviation, row.estimate.mean + deviation]
    ticks = nice_ticks(min(ends), max(ends), target=4)

    def at(value: float) -> float:
        return left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [svg_open("chart", _WIDTH, bottom + 44, description)]
    for tick, text in zip(ticks, tick_labels(ticks), strict=True):
        parts.append(svg_line("grid", at(tick), top, at(tick), bottom + 4))
        parts.append(svg_text("tick mid", at(tick), bottom + 18, text))
    parts.append(svg_text("label mid", (left + right) / 2, bottom + 37, x_title))
    for index, row in enumerate(rows):
        y = top + pitch * (index + 0.5)
        said = mean_and_deviation(row.estimate)
        parts.append(f"<g><title>{escape(row.label)}: {escape(said)}</title>")
        parts.append(svg_text("end", left - 9, y + 4, shortened(row.label, 22)))
        around = row.estimate.deviation
        if around is not None:
            low, high = at(row.estimate.mean - around), at(row.estimate.mean + around)
            parts.append(svg_line("whisker", low, y, high, y))
        kind = escape(row.kind)
        parts += (
            f'<circle class="seed {kind}" cx="{at(v):.1f}" cy="{y:.1f}" r="3"/>' for v in row.values
        )
        parts.append(
            f'<circle class="{kind}" cx="{at(row.estimate.mean):.1f}" cy="{y:.1f}" r="4.5"/>'
        )
        parts.append(svg_text("value", right + 8, y + 4, said))
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def shortened(text: str, limit: int) -> str:
    """The beginning of what is too long."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
