"""``eval neighbors``: test images beside the nearest training images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from solo_ext.config.schema import Seed
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import PositiveInt
from solo_ext.data.transforms import FixedView
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.map import save_picture, seeded_sample, shortened
from solo_ext.lab.evaluation.protocol import Protocol, Row
from solo_ext.lab.pages import plain_text
from solo_ext.memory.knn import cosines, inverse_norms

FILE = "neighbors.png"
_RIGHT, _WRONG, _PLAIN, _PALE = "#12813b", "#b3261e", "#202020", "#d0d0d0"
_BLOCK = 2**24
_PIXELS = 128


class Neighbors(Protocol):
    """Settings of ``eval neighbors``: test images beside the nearest training images.

    >>> Neighbors(queries=5)
    Neighbors(queries=5, k=8, seed=0)
    """

    title: ClassVar[str] = "Nearest neighbours"

    queries: PositiveInt = 10
    k: PositiveInt = 8
    seed: Seed = 0

    def run(self, context: EvalContext) -> list[Row]:
        """One row: ``queries`` shown, ``k``, ``precision`` over the test split, ``picture``.

        ``precision`` is the percentage of the k nearest training images, by cosine similarity,
        with the class of the test image, over all test images and not only those shown.

        Raises:
            ConfigError: fewer training images than ``k``.
        """
        (bank, labels), (x, targets) = context.features.train, context.features.test
        if len(bank) < self.k:
            raise ConfigError("k", self.k, f"there are {len(bank)} training images", "take fewer")
        places, similarities = _nearest(x.to(context.device), bank.to(context.device), self.k)
        precision = 100.0 * float((labels[places] == targets[:, None]).float().mean())
        view, names = FixedView(context.cfg.augmentations[0].crop_size), context.class_names
        grid = []
        for query in seeded_sample(targets, self.queries, self.seed).tolist():
            image, own = context.test[query]
            row = [_Shown(view(image.convert("RGB")), names[own])]
            for place, cosine in zip(places[query], similarities[query].tolist(), strict=True):
                image, target = context.train[int(place)]
                right = target == own
                row.append(_Shown(view(image.convert("RGB")), names[target], cosine, right))
            grid.append(row)
        about = f"{context.title}: precision at {self.k} over the test split {precision:.1f} %"
        save_picture(_draw_grid(grid, about), context.out / FILE)
        return [{"queries": len(grid), "k": self.k, "precision": precision, "picture": FILE}]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Precision over the test split."""
        return {"precision": float(rows[0]["precision"])}


@torch.no_grad()
def _nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices (n, k) of the rows with the largest cosines to each query, and the cosines."""
    scale = inverse_norms(bank)
    found = [
        cosines(part, bank, scale).topk(k, dim=1)
        for part in torch.split(queries, max(1, _BLOCK // len(bank)))
    ]
    return torch.cat([f.indices for f in found]).cpu(), torch.cat([f.values for f in found]).cpu()


class _Shown(NamedTuple):
    """An image, its class's name, similarity to the query, and whether it has the query's class."""

    image: Image.Image
    name: str
    similarity: float | None = None
    right: bool = True


def _draw_grid(rows: Sequence[Sequence[_Shown]], title: str) -> Figure:
    """Draws a row for each query, which comes first, with as many neighbours in all rows.

    Neighbours of the query's class have a green frame, the others none and a red name.
    """
    columns = len(rows[0])
    with plain_text():
        size = (1.12 * columns + 0.35, 1.38 * len(rows) + 0.75)
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        figure.suptitle(title, fontsize=11, x=0.02, ha="left")
        plots = figure.subplots(len(rows), columns, squeeze=False)
        for plot, shown in zip(plots.flat, (shown for row in rows for shown in row), strict=True):
            side = max(_PIXELS, *shown.image.size)
            plot.imshow(shown.image.resize((side, side), Image.Resampling.BICUBIC))
            label, ink, frame, width = shortened(shown.name, 15), _PLAIN, _PLAIN, 1.2
            if shown.similarity is not None:
                label = f"{label}\n{shown.similarity:.2f}"
                frame, width = (_RIGHT, 3.2) if shown.right else (_PALE, 0.6)
                ink = _PLAIN if shown.right else _WRONG
            plot.set(xticks=[], yticks=[])
            plot.spines[:].set(color=frame, linewidth=width)
            plot.set_xlabel(label, fontsize=7.5, color=ink)
        plots[0, 0].set_title("query", fontsize=9, loc="left")
        plots[0, 1].set_title("nearest first →", fontsize=9, loc="left")
    return figure
