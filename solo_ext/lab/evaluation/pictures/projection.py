"""Features in two dimensions."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE, trustworthiness
from torch import Tensor

from solo_ext.lab.evaluation.pictures.packages import viz_package

Method = Literal["pca", "tsne", "umap"]
TITLES: dict[Method, str] = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}
_BEFORE_TSNE = 50
_NEIGHBOURS = 15


@dataclass(frozen=True)
class Projection:
    """How features are laid out.

    Attributes:
        perplexity: of t-SNE, at most a third of the number of images.
        n_neighbors: of UMAP, fewer than there are images.
        min_dist: of UMAP.
        seed: of all three.
    """

    perplexity: float
    n_neighbors: int
    min_dist: float
    seed: int

    def points(self, features: Tensor, method: Method) -> npt.NDArray[np.float64]:
        """Lays out L2-normalised features.

        PCA (Hotelling, 1933); t-SNE (van der Maaten and Hinton, JMLR 2008) of the first 50
        principal components, started at the first two; UMAP (McInnes et al., 2018, arXiv
        1802.03426).

        Args:
            features: (n, D), n above 3.
            method: which.

        Returns:
            (n, 2).
        """
        x = F.normalize(features.double(), dim=1).numpy()
        if method == "pca":
            made: Any = PCA(2, svd_solver="full")
        elif method == "tsne":
            if min(x.shape) > _BEFORE_TSNE:
                x = PCA(_BEFORE_TSNE, random_state=self.seed).fit_transform(x)
            perplexity = min(self.perplexity, (len(x) - 1) / 3)
            made = TSNE(perplexity=perplexity, init="pca", random_state=self.seed)
        else:
            neighbours = min(self.n_neighbors, len(x) - 1)
            # One job: with several the layout is not that of the seed.
            made = viz_package("umap").UMAP(
                n_neighbors=neighbours,
                min_dist=self.min_dist,
                random_state=self.seed,
                n_jobs=1,
            )
        with warnings.catch_warnings():
            # About its own defaults, and spectral layouts of few points.
            warnings.simplefilter("ignore")
            return np.asarray(made.fit_transform(x), dtype=np.float64)


def kept_neighbours(features: Tensor, points: npt.NDArray[np.float64]) -> float:
    """Trustworthiness, at most 1: how far neighbours in the map are neighbours in feature space.

    Of 15 neighbours, fewer for few points (Venna and Kaski, ICANN 2001).
    """
    count = min(_NEIGHBOURS, max(1, (len(points) - 1) // 2))
    x = F.normalize(features.double(), dim=1).numpy()
    return float(trustworthiness(x, points, n_neighbors=count))


def principal_axes(features: Tensor, points: npt.NDArray[np.float64]) -> tuple[str, str]:
    """Names of the axes of PCA's ``points`` with their shares of the variance."""
    total = float(F.normalize(features.double(), dim=1).var(dim=0).sum())
    first, second = points.var(axis=0, ddof=1) / max(total, 1e-30)
    return f"component 1 ({first:.0%} of variance)", f"component 2 ({second:.0%})"
