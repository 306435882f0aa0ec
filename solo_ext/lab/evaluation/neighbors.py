"""``eval neighbors``: test images beside the nearest training images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from solo_ext.config.schema import Seed
from solo_ext.core.errors import ConfigError
from solo_ext.core.files import refuse_link
from solo_ext.core.types import PositiveInt
from solo_ext.data.transforms import FixedView
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.map import shortened
from solo_ext.lab.evaluation.protocol import BackboneProtocol, Row
from solo_ext.memory.knn import cosines, inverse_norms

FILE = "neighbors.png"
_RIGHT, _WRONG = "#12813b", "#b3261e"
_BLOCK = 2**24
_PIXELS = 128


class Neighbors(BackboneProtocol):
    """Settings of ``eval neighbors``: test images beside the nearest training images."""

    title: ClassVar[str] = "Nearest neighbours"

    queries: PositiveInt = 10
    k: PositiveInt = 8
    seed: Seed = 0

    def run(self, context: EvalContext) -> list[Row]:
        """One row: ``queries`` shown, ``k``, ``precision`` over the test split, ``picture``.

        ``precision`` is the percentage of the k nearest training images, by cosine similarity,
        with the class of the test image, over all test images and not only those shown.

        Raises:
            ConfigError: fewer labelled training images than ``k``, or no labelled test image.
        """
        found = context.features
        bank = (found.train_targets >= 0).nonzero().flatten()
        if len(bank) < self.k:
            raise ConfigError("k", self.k, f"there are {len(bank)} training images", "take fewer")
        rows = queries_of_all_classes(found.test_targets, self.queries, self.seed)
        if not len(rows):
            raise ConfigError(
                "data.val_path", None, "no test image has a label", "give class folders"
            )
        labelled, _ = found.split("train")
        places, similarities = nearest(
            found.test.to(found.device), labelled.to(found.device), self.k
        )
        places, similarities = bank[places.cpu()], similarities.cpu()
        right = found.train_targets[places] == found.test_targets[:, None]
        precision = 100.0 * float(right[found.test_targets >= 0].float().mean())
        view = FixedView(context.cfg.augmentations[0].crop_size)
        grid = []
        for query in rows.tolist():
            shown = [context.test[query], *(context.train[int(i)] for i in places[query])]
            similarity = [None, *similarities[query].tolist()]
            grid.append(
                [
                    Shown(view(image.convert("RGB")), context.class_names[target], value, own)
                    for (image, target), value, own in zip(
                        shown, similarity, [True, *right[query].tolist()], strict=True
                    )
                ]
            )
        title = context.cfg.method or context.model.name
        about = f"{title}: precision at {self.k} over the test split {precision:.1f} %"
        context.out.mkdir(parents=True, exist_ok=True)
        draw_grid(grid, about).savefig(refuse_link(context.out / FILE), metadata={"Software": None})
        return [{"queries": len(rows), "k": self.k, "precision": precision, "picture": FILE}]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Precision over the test split."""
        return {"precision": float(rows[0]["precision"])}


@torch.no_grad()
def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of a bank with the largest cosine similarity, the largest first.

    Args:
        queries: (n, D).
        bank: (m, D).
        k: at most m.

    Returns:
        Indices into the bank and similarities, (n, k).

    >>> nearest(torch.tensor([[3.0, 1.0]]), torch.eye(2), k=2)[0]
    tensor([[0, 1]])
    """
    scale = inverse_norms(bank)
    found = [
        cosines(part, bank, scale).topk(k, dim=1)
        for part in torch.split(queries, max(1, _BLOCK // len(bank)))
    ]
    return torch.cat([f.indices for f in found]), torch.cat([f.values for f in found])


def queries_of_all_classes(targets: Tensor, count: int, seed: int) -> Tensor:
    """Draws rows from one class after another, so that as many classes as possible are seen.

    Args:
        targets: (n,), -1 for none.
        count: number of rows; fewer are returned if there are not as many.
        seed: of the draw; it also decides which classes are seen if there are more than ``count``.

    Returns:
        Indices, ordered by class.

    >>> targets = torch.tensor([0, 0, 0, 1, 2, -1])
    >>> targets[queries_of_all_classes(targets, 3, seed=0)].tolist()
    [0, 1, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(targets), generator=generator)
    order = order[targets[order] >= 0]
    labels = targets[order]
    turn = torch.zeros(len(order), dtype=torch.int64)
    classes = torch.unique(labels)
    first = torch.randperm(len(classes), generator=generator)
    for place, label in zip(first.tolist(), classes.tolist(), strict=True):
        own = labels == label
        turn[own] = torch.arange(int(own.sum())) * len(classes) + place
    chosen = order[turn.argsort()[:count]]
    return chosen[targets[chosen].argsort(stable=True)]


@dataclass(frozen=True)
class Shown:
    """An image of the grid.

    Attributes:
        image: a PIL image.
        name: name of its class.
        similarity: to the query; ``None`` for the query itself.
        right: whether its class is the query's.
    """

    image: Image.Image
    name: str
    similarity: float | None = None
    right: bool = True


def draw_grid(rows: Sequence[Sequence[Shown]], title: str) -> Figure:
    """Draws one row per query: the query, then its neighbours.

    Neighbours of the query's class have a green frame, the others none and a red name.

    Args:
        rows: each a query and its neighbours, equally many in all rows.
        title: above the grid.

    >>> grey = Image.new("RGB", (8, 8))
    >>> figure = draw_grid([[Shown(grey, "cat"), Shown(grey, "dog", 0.5, False)]], "PCL")
    >>> [plot.get_xlabel() for plot in figure.axes]
    ['cat', 'dog\\n0.50']
    """
    columns = len(rows[0])
    with mpl.rc_context({"text.parse_math": False}):
        figure = Figure(
            figsize=(1.12 * columns + 0.35, 1.38 * len(rows) + 0.75),
            dpi=130,
            layout="constrained",
        )
        figure.suptitle(title, fontsize=11, x=0.02, ha="left")
        plots = figure.subplots(len(rows), columns, squeeze=False)
        for i, row in enumerate(rows):
            for j, shown in enumerate(row):
                _draw(plots[i, j], shown)
        plots[0, 0].set_title("query", fontsize=9, loc="left")
        plots[0, 1].set_title("nearest first →", fontsize=9, loc="left")
    return figure


def _draw(plot: Any, shown: Shown) -> None:
    side = max(_PIXELS, *shown.image.size)
    plot.imshow(shown.image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))
    label, ink, frame, width = shortened(shown.name, 15), "#202020", "#202020", 1.2
    if shown.similarity is not None:
        label = f"{label}\n{shown.similarity:.2f}"
        frame, width = (_RIGHT, 3.2) if shown.right else ("#d0d0d0", 0.6)
        ink = ink if shown.right else _WRONG
    plot.set(xticks=[], yticks=[])
    plot.spines[:].set(color=frame, linewidth=width)
    plot.set_xlabel(label, fontsize=7.5, color=ink, labelpad=3, linespacing=1.05)
