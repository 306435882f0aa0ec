"""Images beside their nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from solo_ext.core.files import refuse_link
from solo_ext.lab.evaluation.pictures.packages import viz_package
from solo_ext.lab.evaluation.pictures.scatter import shortened
from solo_ext.memory.knn import cosines, inverse_norms

RIGHT, WRONG = "#12813b", "#b3261e"
_BLOCK = 2**24
_PIXELS = 128
_LONGEST_NAME = 15


@torch.no_grad()
def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of a bank with the largest cosine similarity, the largest first.

    Args:
        queries: (n, D).
        bank: (m, D).
        k: at most m.

    Returns:
        Indices into the bank and similarities, (n, k).
    """
    scale = inverse_norms(bank)
    found = [
        cosines(part, bank, scale).topk(k, dim=1)
        for part in torch.split(queries, max(1, _BLOCK // len(bank)))
    ]
    return torch.cat([f.indices for f in found]), torch.cat([f.values for f in found])


@dataclass(frozen=True)
class Shown:
    """An image of the grid.

    Attributes:
        image: PIL's.
        name: of its class.
        similarity: to the query, ``None`` for the query itself.
        right: whether it is of the query's class.
    """

    image: Image.Image
    name: str
    similarity: float | None = None
    right: bool = True


def write_grid(rows: Sequence[Sequence[Shown]], title: str, file: Path) -> None:
    """Draws a row for each query: the query, then its neighbours.

    Neighbours of the query's class have a green frame, the others none and a red name.

    Args:
        rows: each the query and then its neighbours, equally many in all.
        title: above the grid.
        file: the PNG.
    """
    figures = viz_package("matplotlib.figure")
    canvas = viz_package("matplotlib.backends.backend_agg").FigureCanvasAgg
    columns = len(rows[0])
    width, height = 1.12 * columns + 0.35, 1.38 * len(rows) + 0.75
    figure = figures.Figure(figsize=(width, height), dpi=130)
    canvas(figure)
    grid = figure.add_gridspec(
        len(rows),
        columns + 1,
        # A gap behind the query.
        width_ratios=[1, 0.12, *([1] * (columns - 1))],
        left=0.02,
        right=0.98,
        top=1 - 0.68 / height,
        bottom=0.36 / height,
        wspace=0.1,
        hspace=0.38,
    )
    for i, row in enumerate(rows):
        for j, shown in enumerate(row):
            plot = figure.add_subplot(grid[i, j if j == 0 else j + 1])
            _draw(plot, shown)
            if i == 0 and j < 2:
                plot.set_title("query" if j == 0 else "nearest first →", fontsize=9, loc="left")
    figure.text(0.02, 1 - 0.26 / height, title, fontsize=11, va="center")
    figure.savefig(refuse_link(file), metadata={"Software": None})


def _draw(plot: Any, shown: Shown) -> None:
    side = max(_PIXELS, *shown.image.size)
    plot.imshow(shown.image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))
    plot.set_xticks([])
    plot.set_yticks([])
    name = shortened(shown.name, _LONGEST_NAME)
    if shown.similarity is None:
        colour, width, text, ink = "#202020", 1.2, name, "#202020"
    else:
        colour, width = (RIGHT, 3.2) if shown.right else ("#d0d0d0", 0.6)
        text, ink = f"{name}\n{shown.similarity:.2f}", "#202020" if shown.right else WRONG
    for spine in plot.spines.values():
        spine.set_color(colour)
        spine.set_linewidth(width)
    plot.set_xlabel(text, fontsize=7.5, color=ink, labelpad=3, linespacing=1.05)
