"""Maps as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from solo_ext.core.files import refuse_link
from solo_ext.lab.evaluation.pictures.packages import viz_package

COLOURS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
)
"""Tableau's ten; the eleventh class has the first again, with the next shape."""
_SHAPES = ("o", "^", "s", "D", "v", "P")
_LEGEND_ROWS = 20
_LONGEST_NAME = 24


@dataclass(frozen=True)
class Map:
    """Points with what is known of them.

    Attributes:
        points: (n, 2).
        targets: (n,) class numbers.
        classes: names by number.
        names: (n,) of the images.
    """

    points: npt.NDArray[np.float64]
    targets: npt.NDArray[np.int64]
    classes: Sequence[str]
    names: Sequence[str]

    @property
    def present(self) -> list[int]:
        """Numbers of the classes that have a point."""
        return [int(c) for c in np.unique(self.targets)]


def shortened(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name with its middle left out where it is too long, and safe from mathtext."""
    if len(name) > longest:
        half = (longest - 1) // 2
        name = f"{name[: longest - 1 - half]}…{name[-half:]}"
    return name.replace("$", r"\$")


def write_png(what: Map, title: str, axes: tuple[str, str] | None, file: Path) -> None:
    """Draws a map: a colour and shape per class, names at the classes where they do not overlap.

    Args:
        what: the map.
        title: above it.
        axes: labels of the axes; ``None`` for axes that mean nothing.
        file: the PNG.
    """
    figures = viz_package("matplotlib.figure")
    canvas = viz_package("matplotlib.backends.backend_agg").FigureCanvasAgg
    columns = -(-len(what.present) // _LEGEND_ROWS)
    figure = figures.Figure(figsize=(7.6 + 1.5 * columns, 6.4), dpi=140, layout="constrained")
    canvas(figure)
    plot = figure.add_subplot()
    count = len(what.points)
    size = float(np.clip(24000 / count, 9, 36))
    # The classes in turn would cover one another; drawn mixed, none is on top.
    order = np.random.default_rng(0).permutation(count)
    place = {c: i for i, c in enumerate(what.present)}
    for chunk in np.array_split(order, min(8, count)):
        for label in what.present:
            rows = chunk[what.targets[chunk] == label]
            _dots(plot, what.points[rows], place[label], size)
    handles = [_dots(plot, np.empty((0, 2)), place[label], 44) for label in what.present]
    plot.set_title(title, loc="left", fontsize=12)
    plot.set_xticks([])
    plot.set_yticks([])
    plot.set_aspect("equal", adjustable="datalim")
    plot.margins(0.04)
    for side in ("top", "right", "left", "bottom"):
        plot.spines[side].set_color("#c8c8c8")
    if axes is not None:
        plot.set_xlabel(axes[0])
        plot.set_ylabel(axes[1])
    legend = figure.legend(
        handles,
        [str(label) for label in what.present],
        **{"loc": "outside right center", "frameon": False, "fontsize": 9, "ncols": columns},
    )
    for text, label in zip(legend.get_texts(), what.present, strict=True):
        # Written into the legend itself: it leaves out what it is given with a leading underscore.
        text.set_text(shortened(what.classes[label]))
    _name_classes(figure, plot, what)
    figure.savefig(refuse_link(file), metadata={"Software": None})


def _dots(plot: Any, points: npt.NDArray[np.float64], place: int, size: float) -> Any:
    return plot.scatter(
        points[:, 0],
        points[:, 1],
        s=size,
        c=COLOURS[place % len(COLOURS)],
        marker=_SHAPES[place // len(COLOURS) % len(_SHAPES)],
        alpha=0.75,
        linewidths=0,
    )


def _name_classes(figure: Any, plot: Any, what: Map) -> None:
    """Writes a class's name at its median, the largest class first, where there is room."""
    effects = viz_package("matplotlib.patheffects")
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    taken: list[Any] = []
    by_size = sorted(what.present, key=lambda c: -int((what.targets == c).sum()))
    for label in by_size:
        x, y = np.median(what.points[what.targets == label], axis=0)
        text = plot.text(
            x,
            y,
            shortened(what.classes[label]),
            fontsize=11,
            fontweight="bold",
            ha="center",
            va="center",
            color="#101010",
            path_effects=[effects.withStroke(linewidth=3.5, foreground="white")],
        )
        box = text.get_window_extent(renderer).expanded(1.05, 1.15)
        if any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)
