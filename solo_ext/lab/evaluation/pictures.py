"""Protocols that draw: features in two dimensions, and the nearest neighbours of test images."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from annotated_types import Ge, MinLen
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE, trustworthiness
from torch import Tensor

from solo_ext.config.schema import Seed
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import refuse_link
from solo_ext.core.types import NonNegativeFloat, PositiveFloat, PositiveInt
from solo_ext.data.images import Split
from solo_ext.data.reading import name_of
from solo_ext.data.transforms import FixedView
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.protocol import Protocol, Row
from solo_ext.lab.pages import plain_text, png_of
from solo_ext.memory.knn import nearest_neighbors

Method = Literal["pca", "tsne", "umap"]
_TITLES: dict[Method, str] = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}
_BEFORE_TSNE = 50
_NEIGHBOURS = 15
_LEGEND_ROWS = 20
_RIGHT, _WRONG, _PLAIN, _PALE = "#12813b", "#b3261e", "#202020", "#d0d0d0"
_PIXELS = 128


class FeatureMap(Protocol):
    """Settings of ``eval map``: features in two dimensions, a picture for each method.

    >>> FeatureMap(methods=["pca"]).perplexity
    30.0
    """

    title: ClassVar[str] = "Map of the features"
    needs_labels: ClassVar[bool] = False

    methods: Annotated[list[Method], MinLen(1)] = ["pca", "tsne"]
    split: Literal["test", "train"] = "test"
    max_images: PositiveInt = 5000
    max_classes: PositiveInt = 20
    perplexity: PositiveFloat = 30.0
    n_neighbors: Annotated[int, Ge(2)] = 15
    min_dist: NonNegativeFloat = 0.1
    seed: Seed = 0

    def run(self, context: EvalContext) -> list[Row]:
        """One row per method: ``method``, ``images``, ``trustworthiness``, ``picture``.

        Points have the colours of their classes; without labels, all have one colour.

        Trustworthiness, at most 1, says whether neighbours in the map are neighbours in feature
        space, for 15 neighbours or fewer for few points (Venna and Kaski, ICANN 2001).

        Raises:
            ConfigError: fewer than four images.
        """
        features, targets = getattr(context.features, self.split)
        if not context.labelled:
            targets = torch.zeros_like(targets)
        drawn = _seeded_sample(targets, self.max_images, self.seed, self.max_classes)
        if len(drawn) < 4:
            problem = f"leaves {len(drawn)} images"
            raise ConfigError("max_images", self.max_images, problem, "a map needs four")
        x, targets = F.normalize(features[drawn].double(), dim=1).numpy(), targets[drawn].numpy()
        present, names = len(np.unique(targets)), context.class_names
        about = f"{len(drawn)} {self.split} images"
        if context.labelled:
            about += f" of {present} classes"
        if present < len(names):
            about += f" (of {len(names)})"
        count, report = min(_NEIGHBOURS, max(1, (len(x) - 1) // 2)), context.report("maps")
        rows: list[Row] = []
        for done, method in enumerate(dict.fromkeys(self.methods), start=1):
            points, axes = self.points(x, method)
            title = f"{_TITLES[method]} of {context.title}, {about}"
            picture = f"map_{method}.png"
            _save_picture(_draw_map(points, targets, names, title, axes), context.out / picture)
            kept = round(float(trustworthiness(x, points, n_neighbors=count)), 4)
            row: Row = {"method": method, "images": len(drawn), "trustworthiness": kept}
            rows.append({**row, "picture": picture})
            report(done, len(self.methods))
        return rows

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Trustworthiness of each method."""
        return {f"trustworthiness_{r['method']}": float(r["trustworthiness"]) for r in rows}

    def points(
        self, x: npt.NDArray[np.float64], method: Method
    ) -> tuple[npt.NDArray[np.float64], tuple[str, str]]:
        """Maps L2-normalised features (n, D) to (n, 2); also returns names of the axes, if any.

        PCA (Hotelling, 1933); t-SNE (van der Maaten and Hinton, JMLR 2008) of the first 50
        principal components, starting at the first two; UMAP (McInnes et al., 2018, arXiv
        1802.03426). The perplexity is at most a third of the number of images.
        """
        if method == "pca":
            pca = PCA(2, svd_solver="full")
            points, (first, second) = pca.fit_transform(x), pca.explained_variance_ratio_
            return points, (f"component 1 ({first:.0%} of variance)", f"component 2 ({second:.0%})")
        if method == "tsne":
            if min(x.shape) > _BEFORE_TSNE:
                x = PCA(_BEFORE_TSNE, random_state=self.seed).fit_transform(x)
            perplexity = min(self.perplexity, (len(x) - 1) / 3)
            layout: Any = TSNE(perplexity=perplexity, init="pca", random_state=self.seed)
        else:
            try:
                from umap import UMAP
            except ModuleNotFoundError:
                raise UserError(
                    "umap-learn is not installed; pip install 'solo-ext[viz]', or leave umap out "
                    "of methods"
                ) from None
            # With several jobs UMAP would ignore the seed.
            layout = UMAP(
                n_neighbors=min(self.n_neighbors, len(x) - 1),
                min_dist=self.min_dist,
                random_state=self.seed,
                n_jobs=1,
            )
        threads = torch.get_num_threads()
        try:
            with warnings.catch_warnings():
                # They warn about their own defaults, and about spectral layouts of few points.
                warnings.simplefilter("ignore")
                return np.asarray(layout.fit_transform(x), dtype=np.float64), ("", "")
        finally:
            # numba, which UMAP uses, sets the number of OpenMP's threads, and so torch's.
            torch.set_num_threads(threads)


def _draw_map(
    points: npt.NDArray[np.float64],
    targets: npt.NDArray[np.int64],
    classes: Sequence[str],
    title: str,
    axes: tuple[str, str] = ("", ""),
) -> Figure:
    """Draws points (n, 2) with a colour and marker per class, and the class names in a legend.

    Without names of classes there is no legend.
    """
    present = np.unique(targets).tolist()
    columns = -(-len(present) // _LEGEND_ROWS) if classes else 0
    looks: dict[int, Any] = {
        label: {"color": f"C{place % 10}", "marker": "o^sDvP"[place // 10 % 6]}
        for place, label in enumerate(present)
    }
    with plain_text():
        figure = Figure(figsize=(7.6 + 1.5 * columns, 6.4), dpi=140, layout="constrained")
        plot = figure.subplots()
        size = float(np.clip(24000 / len(points), 9, 36))
        # Draw the classes in mixed chunks, so that none covers all others.
        order = np.random.default_rng(0).permutation(len(points))
        for chunk in np.array_split(order, min(8, len(order))):
            for label in present:
                x, y = points[chunk[targets[chunk] == label]].T
                plot.scatter(x, y, s=size, alpha=0.75, linewidths=0, **looks[label])
        plot.set_title(title, loc="left", fontsize=12)
        plot.set(xticks=[], yticks=[], xlabel=axes[0], ylabel=axes[1])
        plot.set_aspect("equal", adjustable="datalim")
        plot.spines[:].set_color("#c8c8c8")
        if not classes:
            return figure
        legend = figure.legend(
            [Line2D([], [], linestyle="", **looks[label]) for label in present],
            [str(label) for label in present],
            loc="outside right center",
            frameon=False,
            fontsize=9,
            ncols=columns,
        )
        for text, label in zip(legend.get_texts(), present, strict=True):
            # Set names afterwards: a legend leaves out labels with a leading underscore.
            text.set_text(_shortened(classes[label], 24))
    return figure


class Neighbors(Protocol):
    """Settings of ``eval neighbors``: test images beside the nearest training images.

    >>> Neighbors(queries=5)
    Neighbors(queries=5, k=8, seed=0)
    """

    title: ClassVar[str] = "Nearest neighbours"
    needs_labels: ClassVar[bool] = False

    queries: PositiveInt = 10
    k: PositiveInt = 8
    seed: Seed = 0

    def run(self, context: EvalContext) -> list[Row]:
        """One row: ``queries`` shown, ``k``, ``precision`` over the test split, ``picture``.

        ``precision`` is the percentage of the k nearest training images, by cosine similarity,
        with the class of the test image, over all test images and not only those shown. Without
        labels there is ``similarity`` instead, the mean cosine of these neighbours, and names of
        files stand in for those of classes. A training image is no neighbour of itself.

        Raises:
            ConfigError: fewer training images than ``k``.
        """
        (bank, labels), (x, targets) = context.features.train, context.features.test
        drawn = context.own_rows()
        others = len(bank) - (drawn is not None)
        if others < self.k:
            raise ConfigError("k", self.k, f"there are {others} training images", "take fewer")
        places, similarities = nearest_neighbors(
            x.to(context.device), bank.to(context.device), self.k, drawn
        )
        if context.labelled:
            precision = 100.0 * float((labels[places] == targets[:, None]).float().mean())
            found = {"precision": precision}
            said = f"precision at {self.k} over the test split {precision:.1f} %"
        else:
            similarity = float(similarities.double().mean())
            found = {"similarity": similarity}
            said = f"mean cosine at {self.k} over the test split {similarity:.2f}"
        grid = []
        for query in _seeded_sample(targets, self.queries, self.seed).tolist():
            own = int(targets[query])
            row = [self._shown(context, "val", query)]
            for place, cosine in zip(places[query], similarities[query].tolist(), strict=True):
                shown = self._shown(context, "train", int(place))
                right = int(labels[place]) == own if context.labelled else None
                row.append(shown._replace(similarity=cosine, right=right))
            grid.append(row)
        picture = "neighbors.png"
        _save_picture(_draw_grid(grid, f"{context.title}: {said}"), context.out / picture)
        return [{"queries": len(grid), "k": self.k, **found, "picture": picture}]

    @staticmethod
    def _shown(context: EvalContext, split: Split, row: int) -> _Shown:
        images, index = context.train, context.image_index(split, row)
        if split == "val":
            images = context.test
        image, target = images[index]
        view, names = FixedView(context.cfg.augmentations[0].crop_size), context.class_names
        name = names[target] if context.labelled else Path(name_of(images, index)).name
        return _Shown(view(image.convert("RGB")), name)

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Precision over the test split, or without labels the mean similarity."""
        key = "precision" if "precision" in rows[0] else "similarity"
        return {key: float(rows[0][key])}


class _Shown(NamedTuple):
    """An image, the name of its class or file, similarity to the query, and whether it has the
    query's class, ``None`` without labels."""

    image: Image.Image
    name: str
    similarity: float | None = None
    right: bool | None = True


def _draw_grid(rows: Sequence[Sequence[_Shown]], title: str) -> Figure:
    """Draws a row for each query: the query, then its neighbours, equally many in all rows.

    Neighbours of the query's class have a green frame, the others a thin grey frame and a red name.
    Without labels, all have the grey frame.
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
            label, ink, frame, width = _shortened(shown.name, 15), _PLAIN, _PLAIN, 1.2
            if shown.similarity is not None:
                label = f"{label}\n{shown.similarity:.2f}"
                frame, width = (_RIGHT, 3.2) if shown.right else (_PALE, 0.6)
                ink = _WRONG if shown.right is False else _PLAIN
            plot.set(xticks=[], yticks=[])
            plot.spines[:].set(color=frame, linewidth=width)
            plot.set_xlabel(label, fontsize=7.5, color=ink)
        plots[0, 0].set_title("query", fontsize=9, loc="left")
        plots[0, 1].set_title("nearest first →", fontsize=9, loc="left")
    return figure


def _seeded_sample(
    targets: Tensor, count: int, seed: int, max_classes: int | None = None
) -> Tensor:
    """Draws at most ``count`` rows of at most ``max_classes`` classes; returns sorted indices."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.unique(targets)
    if max_classes is not None and len(classes) > max_classes:
        classes = classes[torch.randperm(len(classes), generator=generator)[:max_classes]]
    rows = torch.nonzero(torch.isin(targets, classes)).flatten()
    return rows[torch.randperm(len(rows), generator=generator)[:count]].sort().values


def _save_picture(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    refuse_link(file).write_bytes(png_of(figure))


def _shortened(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
