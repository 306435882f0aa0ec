"""Parts of inline SVG figures that reports share.

Colours are CSS variables of :mod:`solo_ext.lab.evaluation.page_style`, so that one figure serves
the light, the dark and the printed version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

SVG_STYLE = """\
svg { display: block; width: 100%; height: auto; font: 12px system-ui, "Segoe UI", Helvetica,
  Arial, sans-serif; font-variant-numeric: tabular-nums }
svg text { fill: var(--ink) }
svg .tick, svg .label { fill: var(--soft) }
.mid { text-anchor: middle }
.end { text-anchor: end }
.axis { stroke: var(--soft) }
line.grid { stroke: var(--rule) }
.whisker { stroke: var(--ink); stroke-width: 1.5 }
.plugin { fill: var(--plugin) }
.host { fill: var(--host) }
.baseline { fill: var(--baseline) }
"""
LEGEND_STYLE = """\
.legend { display: flex; flex-wrap: wrap; gap: .15rem .9rem; margin: .4rem 0; padding: 0;
  list-style: none; font-size: .85rem }
.legend li { display: flex; align-items: center; gap: .35rem }
.legend svg { width: .7rem; height: .7rem; flex: none }
"""


def nice_ticks(low: float, high: float, target: int = 5, whole: bool = False) -> list[float]:
    """Returns increasing round numbers, about `target` steps of 1, 2 or 5 times a power of ten.

    Args:
        low: Smallest value of the data.
        high: Largest value of the data.
        target: Number of steps aimed at.
        whole: Never step by less than one (for counts such as epochs).

    Returns:
        At least two ticks; the first is at most `low` and the last at least `high`.
    """
    largest = max(abs(low), abs(high))
    # A range this narrow is a constant up to rounding: steps within it would not be distinct.
    if high - low <= 1e-9 * largest:
        pad = 0.1 * largest or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    if whole:
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Formats ticks with as many digits as tell them apart, and no more."""
    step = ticks[1] - ticks[0]
    largest = max(abs(tick) for tick in ticks)
    place = math.floor(math.log10(step) + 1e-9)
    if largest < 1e5 and step >= 1e-4:
        return [f"{tick:.{max(0, -place)}f}" for tick in ticks]
    digits = max(0, math.floor(math.log10(largest)) - place)
    return [_scientific(tick, digits) for tick in ticks]


def _scientific(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def svg_open(css: str, width: float, height: float, description: str) -> str:
    """Opens a figure that a screen reader calls by its description."""
    return (
        f'<svg class="{css}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(description)}">'
    )


def svg_line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A line between two points."""
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def svg_text(css: str, x: float, y: float, content: str, extra: str = "") -> str:
    """Text, escaped; ``extra`` are further attributes."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}"{extra}>{escape(content)}</text>'
