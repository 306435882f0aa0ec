"""Inline SVG figures of the demo report: bars, loss curves and scatter maps.

Colours and shared parts: `solo_ext.evaluation.svg`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from solo_ext.evaluation.svg import (
    SVG_STYLE,
    nice_ticks,
    svg_line,
    svg_open,
    svg_text,
    tick_labels,
)

# Petroff (2021), ten colours chosen to stay distinct under colour-vision deficiency.
CLASS_COLOURS = (
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6",
    "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
FIGURE_STYLE = (
    SVG_STYLE
    + """\
.bars { min-width: 42rem; font-size: 13px }
.curve { fill: none; stroke: var(--plugin); stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round }
.lone { stroke-width: 6 }
.frame { fill: none; stroke: var(--rule) }
circle { fill-opacity: .8 }
svg .center { font-size: 14px; font-weight: 700; paint-order: stroke; stroke: var(--page);
  stroke-width: 4px; stroke-linejoin: round; pointer-events: none }
"""
    + "\n".join(f".c{index} {{ fill: {colour} }}" for index, colour in enumerate(CLASS_COLOURS))
)

DASH = "\N{EN DASH}"
_LABEL_LIMIT = 32


@dataclass(frozen=True)
class Bar:
    """One bar of a percentage chart; a non-finite mean is drawn as a dash, without a bar."""

    label: str
    kind: str
    mean: float
    std: float


def mean_std(mean: float, std: float) -> str:
    """Formats a mean and its standard deviation to one decimal, a dash where not finite."""
    if not math.isfinite(mean):
        return DASH
    return f"{mean:.1f} ± {std:.1f}" if math.isfinite(std) else f"{mean:.1f}"


def bar_chart(bars: Sequence[Bar], axis_label: str) -> str:
    """Draws horizontal bars on a 0 to 100 axis, with whiskers of one standard deviation."""
    longest = max((min(len(bar.label), _LABEL_LIMIT) for bar in bars), default=0)
    left, width, pitch, top = 24 + 8.4 * longest, 880.0, 30.0, 8.0
    right, bottom = width - 110, top + pitch * len(bars)
    parts = [svg_open("bars", width, bottom + 44, axis_label)]
    for tick in range(0, 101, 20):
        x = left + (right - left) * tick / 100
        parts.append(svg_line("axis" if tick == 0 else "grid", x, top, x, bottom + 4))
        parts.append(svg_text("tick mid", x, bottom + 19, str(tick)))
    parts.append(svg_text("label mid", (left + right) / 2, bottom + 38, axis_label))
    for index, bar in enumerate(bars):
        parts += _bar(bar, left, right, top + pitch * (index + 0.5))
    return "".join([*parts, "</svg>"])


def _bar(bar: Bar, left: float, right: float, middle: float) -> Iterator[str]:
    def at(percent: float) -> float:
        return left + (right - left) * min(max(percent, 0.0), 100.0) / 100

    name = bar.label
    if len(name) > _LABEL_LIMIT:
        name = name[: _LABEL_LIMIT - 1] + "…"
    yield f"<g><title>{escape(bar.label)}: {mean_std(bar.mean, bar.std)}</title>"
    yield svg_text("name end", left - 10, middle + 4, name)
    if math.isfinite(bar.mean):
        yield (
            f'<rect class="bar {escape(bar.kind)}" x="{left:.1f}" y="{middle - 9:.1f}" '
            f'width="{at(bar.mean) - left:.1f}" height="18"/>'
        )
        if math.isfinite(bar.std):
            low, high = at(bar.mean - bar.std), at(bar.mean + bar.std)
            yield svg_line("whisker", low, middle, high, middle)
            yield svg_line("whisker", low, middle - 4, low, middle + 4)
            yield svg_line("whisker", high, middle - 4, high, middle + 4)
    yield svg_text("value", right + 14, middle + 4, mean_std(bar.mean, bar.std))
    yield "</g>"


def loss_chart(label: str, epochs: Sequence[float], losses: Sequence[float]) -> str:
    """Draws a loss curve; epochs whose loss is not finite leave a gap."""
    left, right, top, bottom = 66.0, 310.0, 12.0, 180.0
    pairs = [(float(x), float(y)) for x, y in zip(epochs, losses, strict=True)]
    shown = [pair for pair in pairs if all(map(math.isfinite, pair))]
    parts = [svg_open("loss", 322, 222, f"Training loss of {label} by epoch")]
    if not shown:
        parts.append(svg_text("label mid", 161, 100, "no finite loss recorded"))
        return "".join([*parts, "</svg>"])
    xs, ys = zip(*shown, strict=True)
    x_ticks = nice_ticks(min(xs), max(xs), whole=True)
    y_ticks = nice_ticks(min(ys), max(ys), target=4)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return left + (right - left) * across, bottom - (bottom - top) * up

    for tick, text in zip(y_ticks, tick_labels(y_ticks), strict=True):
        y = place(x_ticks[0], tick)[1]
        parts.append(svg_line("grid", left, y, right, y))
        parts.append(svg_text("tick ytick end", left - 7, y + 4, text))
    for tick, text in zip(x_ticks, tick_labels(x_ticks), strict=True):
        x = place(tick, y_ticks[0])[0]
        parts.append(svg_line("axis", x, bottom, x, bottom + 4))
        parts.append(svg_text("tick xtick mid", x, bottom + 18, text))
    parts.append(svg_line("axis", left, bottom, right, bottom))
    parts.append(svg_text("label mid", (left + right) / 2, bottom + 37, "epoch"))
    middle = (top + bottom) / 2
    turn = f' transform="rotate(-90 10 {middle:.1f})"'
    parts.append(svg_text("label mid", 10, middle, "loss", turn))
    parts += (_path([place(x, y) for x, y in run]) for run in _finite_runs(pairs))
    return "".join([*parts, "</svg>"])


def _finite_runs(pairs: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for pair in pairs:
        if all(map(math.isfinite, pair)):
            run.append(pair)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _path(points: Sequence[tuple[float, float]]) -> str:
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    # With round caps a zero-length line is a dot: a lone epoch would otherwise be invisible.
    dot, css = ("h0", "curve lone") if len(points) == 1 else ("", "curve")
    return f'<path class="{css}" d="M{steps}{dot}"/>'


def scatter(
    label: str,
    points: npt.NDArray[Any],
    targets: npt.NDArray[Any],
    class_names: Sequence[str],
) -> str:
    """Draws a 2-D map, one circle per point with finite coordinates, at equal scale on both axes.

    Each class is also named at its median, so that colour is not the only way to tell it.
    """
    size, pad = 320.0, 14.0
    finite = np.isfinite(points).all(axis=1)
    points, targets = points[finite].astype(np.float64), targets[finite].astype(int)
    parts = [svg_open("map", size, size, f"Two-dimensional map of {label}, coloured by class")]
    parts.append(
        f'<rect class="frame" x="0.5" y="0.5" width="{size - 1:g}" height="{size - 1:g}"/>'
    )
    if len(points):
        low, high = points.min(axis=0), points.max(axis=0)
        span = float((high - low).max()) or 1.0
        # SVG counts y downwards; flipping it keeps the orientation of the data.
        placed = size / 2 + (points - (low + high) / 2) / span * (size - 2 * pad) * [1, -1]
        parts += (
            f'<circle class="c{target}" cx="{x:.1f}" cy="{y:.1f}" r="2.3">'
            f"<title>{escape(class_names[target])}</title></circle>"
            for (x, y), target in zip(placed, targets, strict=True)
        )
        for target in np.unique(targets):
            x, y = np.median(placed[targets == target], axis=0)
            parts.append(svg_text("center mid", x, y + 4, class_names[target]))
    return "".join([*parts, "</svg>"])
