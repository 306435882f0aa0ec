"""``eval map``: features in two dimensions, as pictures."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from annotated_types import Ge, MinLen
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE, trustworthiness
from torch import Tensor

from solo_ext.config.schema import Seed
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import refuse_link
from solo_ext.core.types import NonNegativeFloat, PositiveFloat, PositiveInt
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.protocol import Protocol, Row
from solo_ext.lab.pages import plain_text, png_of

Method = Literal["pca", "tsne", "umap"]
_TITLES: dict[Method, str] = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}
_BEFORE_TSNE = 50
_NEIGHBOURS = 15
_LEGEND_ROWS = 20


class FeatureMap(Protocol):
    """Settings of ``eval map``: features in two dimensions, a picture for each method.

    >>> FeatureMap(methods=["pca"], max_images=1000).perplexity
    30.0
    """

    title: ClassVar[str] = "Map of the features"

    methods: Annotated[list[Method], MinLen(1)] = ["pca", "tsne", "umap"]
    split: Literal["test", "train"] = "test"
    max_images: PositiveInt = 5000
    max_classes: PositiveInt = 20
    perplexity: PositiveFloat = 30.0
    n_neighbors: Annotated[int, Ge(2)] = 15
    min_dist: NonNegativeFloat = 0.1
    seed: Seed = 0

    def run(self, context: EvalContext) -> list[Row]:
        """One row per method: ``method``, ``images``, ``trustworthiness``, ``picture``.

        Trustworthiness, at most 1, says whether neighbours in the map are neighbours in feature
        space, for 15 neighbours or fewer for few points (Venna and Kaski, ICANN 2001).

        Raises:
            ConfigError: fewer than four images.
        """
        features, targets = getattr(context.features, self.split)
        drawn = seeded_sample(targets, self.max_images, self.seed, self.max_classes)
        if len(drawn) < 4:
            problem = f"leaves {len(drawn)} images"
            raise ConfigError("max_images", self.max_images, problem, "a map needs four")
        x, targets = F.normalize(features[drawn].double(), dim=1).numpy(), targets[drawn].numpy()
        present, names = len(np.unique(targets)), context.class_names
        about = f"{len(drawn)} {self.split} images of {present} classes"
        if present < len(names):
            about += f" (of {len(names)})"
        count, report = min(_NEIGHBOURS, max(1, (len(x) - 1) // 2)), context.report("maps")
        rows: list[Row] = []
        for done, method in enumerate(dict.fromkeys(self.methods), start=1):
            points, axes = self._points(x, method)
            title = f"{_TITLES[method]} of {context.title}, {about}"
            picture = f"map_{method}.png"
            save_picture(_draw_map(points, targets, names, title, axes), context.out / picture)
            kept = round(float(trustworthiness(x, points, n_neighbors=count)), 4)
            row: Row = {"method": method, "images": len(drawn), "trustworthiness": kept}
            rows.append({**row, "picture": picture})
            report(done, len(self.methods))
        return rows

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Trustworthiness of each method."""
        return {f"trustworthiness_{r['method']}": float(r["trustworthiness"]) for r in rows}

    def _points(
        self, x: npt.NDArray[np.float64], method: Method
    ) -> tuple[npt.NDArray[np.float64], tuple[str, str]]:
        """Lays out L2-normalised features (n, D): (n, 2), and names of the axes if they have some.

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
        with warnings.catch_warnings():
            # The libraries warn about their own defaults, and about spectral layouts of few points.
            warnings.simplefilter("ignore")
            return np.asarray(layout.fit_transform(x), dtype=np.float64), ("", "")


def _draw_map(
    points: npt.NDArray[np.float64],
    targets: npt.NDArray[np.int64],
    classes: Sequence[str],
    title: str,
    axes: tuple[str, str] = ("", ""),
) -> Figure:
    """The picture of points (n, 2): a colour and shape per class, and their names in a legend."""
    present = np.unique(targets).tolist()
    columns = -(-len(present) // _LEGEND_ROWS)
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
        legend = figure.legend(
            [Line2D([], [], linestyle="", **looks[label]) for label in present],
            [str(label) for label in present],
            loc="outside right center",
            frameon=False,
            fontsize=9,
            ncols=columns,
        )
        for text, label in zip(legend.get_texts(), present, strict=True):
            # Set it afterwards: a legend leaves out labels with a leading underscore.
            text.set_text(shortened(classes[label], 24))
    return figure


def seeded_sample(targets: Tensor, count: int, seed: int, max_classes: int | None = None) -> Tensor:
    """Draws at most ``count`` rows of at most ``max_classes`` classes; indices in ascending order.

    >>> seeded_sample(torch.tensor([0, 1, 0]), count=9, seed=0, max_classes=1).tolist()
    [0, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    classes = torch.unique(targets)
    if max_classes is not None and len(classes) > max_classes:
        classes = classes[torch.randperm(len(classes), generator=generator)[:max_classes]]
    rows = torch.nonzero(torch.isin(targets, classes)).flatten()
    return rows[torch.randperm(len(rows), generator=generator)[:count]].sort().values


def save_picture(figure: Figure, file: Path) -> None:
    """Writes a figure as PNG, creating the folder; equal figures give equal files.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "maps" / "pca.png"
    >>> save_picture(Figure(figsize=(2, 1)), file)
    >>> file.read_bytes()[1:4]
    b'PNG'
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    refuse_link(file).write_bytes(png_of(figure))


def shortened(name: str, longest: int) -> str:
    """Cuts the end off a name that is too long.

    >>> shortened("wheelbarrow", longest=6)
    'wheel…'
    """
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
