"""Protocols that score frozen features as they are: kNN, retrieval, clustering, geometry."""

from __future__ import annotations

import math
import statistics
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Gt, MinLen
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor

from solo_ext.clustering import kmeans
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import NonNegativeInt, PositiveFloat, PositiveInt
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.protocol import FeatureProtocol, NotHigher, Row
from solo_ext.losses.alignment import effective_rank
from solo_ext.memory.knn import cosines, inverse_norms, knn_accuracy

_RANKED, _COMPARED = 2**21, 2**23
"""Most elements of a block of cosines: for retrieval, which sorts it, and for uniformity."""
_DEAD = 1e-4
"""A dimension is dead if its standard deviation is at most this share of the largest one."""


class KNN(FeatureProtocol):
    """Settings of ``eval knn``: every k with every temperature, from one pass.

    >>> rows = torch.eye(6), torch.arange(6)
    >>> KNN(k=[1], temperature=[0.1]).measure(Features(rows, rows, list("abcdef")))
    [{'k': 1, 'temperature': 0.1, 'acc1': 100.0, 'acc5': 100.0}]
    """

    title: ClassVar[str] = "Weighted cosine kNN"

    k: Annotated[list[PositiveInt], MinLen(1)] = [1, 5, 20, 200]
    temperature: Annotated[list[PositiveFloat], MinLen(1)] = [0.07, 0.1]

    def measure(self, features: Features) -> list[Row]:
        """One row per k and temperature: ``k``, ``temperature``, ``acc1``, ``acc5``."""
        (bank, labels), (queries, targets) = features.train, features.test
        scores = knn_accuracy(
            queries, targets, bank, labels, ks=self.k, temperatures=self.temperature
        )
        return [
            {"k": k, "temperature": t, "acc1": tops[1], "acc5": tops[5]}
            for (k, t), tops in scores.items()
        ]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Accuracy at k = 20, or else at the first k; also at k = 200 and temperature 0.1.

        The first is DINO's protocol, the second that of InstDisc and of lightly's tables.
        """
        chosen = next((r for r in rows if r["k"] == 20), rows[0])
        found = {"acc1": float(chosen["acc1"])}
        wide = next((r for r in rows if (r["k"], r["temperature"]) == (200, 0.1)), chosen)
        return found if wide is chosen else {**found, "acc1_200": float(wide["acc1"])}


class Retrieval(FeatureProtocol):
    """Settings of ``eval retrieval``: test images are the queries, ``gallery`` is ranked.

    ``gallery``: the test split without the image itself, or the train split.

    >>> rows = torch.eye(2).repeat(3, 1), torch.arange(2).repeat(3)
    >>> Retrieval(k=[1]).measure(Features(rows, rows, ["cat", "dog"]))
    [{'gallery': 'test', 'map': 100.0, 'recall_1': 100.0, 'queries': 6}]
    """

    title: ClassVar[str] = "Retrieval"

    k: Annotated[list[PositiveInt], MinLen(1)] = [1, 5, 10]
    gallery: Literal["test", "train"] = "test"

    @torch.no_grad()
    def measure(self, features: Features) -> list[Row]:
        """One row: ``map``, ``recall_<k>`` in percent, and the number of ``queries``.

        The gallery is ranked by cosine for every query; rows of the query's class are relevant.
        Average precision is ``mean_{relevant r} |{relevant up to rank r}| / rank(r)`` over the
        whole ranking, recall the share of queries with a relevant row among the first k. Equal
        similarities keep the order of the gallery. Queries without a relevant row are left out.
        """
        (queries, targets), (rows, labels) = features.test, getattr(features, self.gallery)
        alone = self.gallery == "test"
        scale, size = inverse_norms(rows), max(1, _RANKED // len(rows))
        precision = torch.zeros((), dtype=torch.float64, device=rows.device)
        hits = {k: torch.zeros((), dtype=torch.int64, device=rows.device) for k in self.k}
        count = torch.zeros((), dtype=torch.int64, device=rows.device)
        for start in range(0, len(queries), size):
            similarity = cosines(queries[start : start + size], rows, scale)
            if alone:
                # Mask the query itself: it sorts last and is sliced off.
                similarity.diagonal(start).fill_(float("-inf"))
            order = similarity.argsort(dim=1, descending=True, stable=True)[:, : len(rows) - alone]
            relevant = labels[order] == targets[start : start + size, None]
            ranks = torch.arange(1, order.shape[1] + 1, device=rows.device)
            share = relevant.cumsum(1) / ranks
            average = (share * relevant).sum(1, dtype=torch.float64) / relevant.sum(1).clamp_min(1)
            precision += average.sum()
            count += relevant.any(1).sum()
            for k in self.k:
                hits[k] += relevant[:, :k].any(1).sum()
        total = int(count)
        if not total:
            problem = "no query shares its class with a row of the gallery"
            other = "train" if alone else "test"
            remedy = f"give more images of a class, or take gallery={other}"
            raise ConfigError("gallery", self.gallery, problem, remedy)
        recalls = {f"recall_{k}": 100 * int(hit) / total for k, hit in hits.items()}
        found = {"map": 100 * float(precision) / total, **recalls, "queries": total}
        return [{"gallery": self.gallery, **found}]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """``map`` and the recalls."""
        return {k: float(v) for k, v in rows[0].items() if k.startswith(("map", "recall_"))}


class Clustering(FeatureProtocol):
    """Settings of ``eval clustering``: k-means of L2-normalised features against the classes.

    Without ``k`` there are as many clusters as classes.

    >>> import torch
    >>> y = torch.arange(2).repeat(10)
    >>> rows = torch.eye(2)[y], y
    >>> (row,) = Clustering(seeds=1).measure(Features(rows, rows, ["cat", "dog"]))
    >>> row["k"], round(row["nmi"]), row["accuracy"]
    (2, 100, 100.0)
    """

    title: ClassVar[str] = "Clustering"

    k: list[Annotated[int, Gt(1)]] | None = None
    seeds: PositiveInt = 3
    restarts: PositiveInt = 5
    iterations: PositiveInt = 50
    split: Literal["train", "test"] = "test"

    def measure(self, features: Features) -> list[Row]:
        """One row per k: means and sample deviations over seeds, in percent."""
        rows, targets = getattr(features, self.split)
        classes = len(features.present)
        if self.k is None and classes < 2:
            problem = "there is one class, which any clusters agree with"
            raise ConfigError("k", None, problem, "give k")
        unit = F.normalize(rows.float(), dim=1)
        found = []
        for place, k in enumerate([classes] if self.k is None else self.k):
            if k > len(unit):
                raise ConfigError(
                    "k" if self.k is None else f"k.{place}",
                    k,
                    f"the {self.split} split has {len(unit)} labelled images",
                    "take fewer clusters, or split=train",
                )
            scores = []
            for seed in range(self.seeds):
                clusters = kmeans(
                    unit, k, restarts=self.restarts, iterations=self.iterations, seed=seed
                )
                scores.append(_cluster_scores(targets, clusters.assignments))
            row: Row = {"k": k, "seeds": self.seeds}
            for name in scores[0]:
                values = [s[name] for s in scores]
                row[name] = statistics.fmean(values)
                row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
            found.append(row)
        return found

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """The scores for the first k."""
        return {name: float(rows[0][name]) for name in ("nmi", "ari", "accuracy")}


def _cluster_scores(targets: Tensor, assignments: Tensor) -> dict[str, float]:
    """Agreement of clusters (n,) with classes (n,), in percent.

    ``nmi`` is normalised by the arithmetic mean of the entropies; ``accuracy`` is that of the best
    one-to-one matching of clusters to classes (Hungarian method), where rows of unmatched clusters
    are wrong; ``purity`` is the share of rows of the most frequent class of their cluster.
    """
    classes, clusters = targets.cpu().numpy(), assignments.cpu().numpy()
    table = contingency_matrix(classes, clusters)
    matched = table[linear_sum_assignment(table, maximize=True)].sum()
    return {
        "nmi": 100 * float(normalized_mutual_info_score(classes, clusters)),
        "ari": 100 * float(adjusted_rand_score(classes, clusters)),
        "accuracy": 100 * float(matched / table.sum()),
        "purity": 100 * float(np.max(table, axis=0).sum() / table.sum()),
    }


class Geometry(FeatureProtocol):
    """Settings of ``eval geometry``: spread and collapse of the features of a split.

    If there are more than ``samples`` images, ``samples`` of them are drawn with ``seed``.

    >>> rows = torch.eye(6), torch.arange(6) % 2
    >>> (row,) = Geometry().measure(Features(rows, rows, ["cat", "dog"]))
    >>> row["images"], row["dimensions"], row["mean_cosine"]
    (6, 6, 0.0)
    """

    title: ClassVar[str] = "Geometry and collapse"
    needs_labels: ClassVar[bool] = False
    not_higher: ClassVar[NotHigher] = {"uniformity": "lower", "dead": "lower"}

    split: Literal["train", "test"] = "test"
    samples: Annotated[int, Gt(1)] = 10_000
    seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[Row]:
        """One row: the numbers of :func:`_feature_geometry`, with ``None`` instead of nan."""
        rows, targets = getattr(features, self.split)
        if len(rows) < 2:
            other = "train" if self.split == "test" else "test"
            raise ConfigError(
                "split",
                self.split,
                "it has one image, and the spread of features needs two",
                f"give more images, or take split={other}",
            )
        if len(rows) > self.samples:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randperm(len(rows), generator=generator)[: self.samples]
            rows, targets = rows[drawn], targets[drawn]
        found = _feature_geometry(rows, targets)
        plain = {k: None if math.isnan(v) else v for k, v in found.items()}
        return [{"images": len(rows), "dimensions": rows.shape[1], **plain}]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """``effective_rank``, ``uniformity``, ``dead``."""
        return {k: float(rows[0][k]) for k in ("effective_rank", "uniformity", "dead")}


@torch.no_grad()
def _feature_geometry(features: Tensor, targets: Tensor) -> dict[str, float]:
    """Measures the spread of features (n, D), n at least 2, with n^2 D operations.

    - ``effective_rank`` of the features as they are, in [1, min(n, D)];
    - ``uniformity``, ``log mean_{i != j} exp(-2 |x_i - x_j|^2)`` of unit rows, at most 0;
    - ``class_alignment``, the mean ``|x_i - x_j|^2`` of unit rows over pairs of the same class,
      in [0, 4]; nan if no class has two rows, as without labels (targets of -1);
    - ``mean_cosine`` over pairs of rows;
    - ``std``, the mean standard deviation of the dimensions of unit rows, times ``sqrt(D)``: about
      1 for an isotropic cloud, 0 for a collapsed one;
    - ``dead``, the percentage of dimensions that hardly vary, and the rows' ``mean_norm``.

    Source:
        Effective rank: Garrido et al., ICML 2023, arXiv 2210.02885. Alignment and uniformity: Wang
        and Isola, ICML 2020, arXiv 2005.10242. Deviation: Chen and He, CVPR 2021, arXiv 2011.10566.
    """
    x = features.float()
    deviations = x.std(dim=0, correction=0)
    unit = F.normalize(x, dim=1)
    count = len(x)
    # |sum_i x_i|^2 counts every pair twice, and every row once with itself.
    pairs = float(unit.double().sum(0).square().sum() - unit.double().square().sum())
    return {
        "effective_rank": float(effective_rank(x)),
        "uniformity": gaussian_potential(unit),
        "class_alignment": _class_alignment(unit, targets),
        "mean_cosine": pairs / (count * (count - 1)),
        "std": float(unit.std(dim=0, correction=0).mean()) * math.sqrt(x.shape[1]),
        "dead": 100 * float((deviations <= _DEAD * deviations.max()).float().mean()),
        "mean_norm": float(x.norm(dim=1).mean()),
    }


def gaussian_potential(unit: Tensor) -> float:
    """Uniformity of unit rows (n, D), n at least 2, in this process alone and block by block.

    ``log mean_{i != j} exp(-2 |x_i - x_j|^2)`` (Wang and Isola, ICML 2020, arXiv 2005.10242).

    Returns:
        In [-8, 0]: 0 if all rows are equal, about -4 if they are orthogonal.

    >>> round(gaussian_potential(torch.eye(3)), 4)
    -4.0
    """
    count, scale = len(unit), inverse_norms(unit)
    size = max(1, _COMPARED // count)
    masses = []
    for start in range(0, count, size):
        # Unit rows: -2 |x - y|^2 = 4 x.y - 4.
        potentials = cosines(unit[start : start + size], unit, scale).mul_(4).sub_(4)
        potentials.diagonal(start).fill_(float("-inf"))
        masses.append(potentials.logsumexp(1))
    mass = torch.cat(masses).double().logsumexp(0)
    return float(mass) - math.log(count * (count - 1))


def _class_alignment(unit: Tensor, targets: Tensor) -> float:
    """Uses sums per class: ``sum_{i,j} |x_i - x_j|^2 = 2 n sum |x_i|^2 - 2 |sum x_i|^2``."""
    labelled = targets >= 0
    found, own = torch.unique(targets[labelled], return_inverse=True)
    classes = len(found)
    x = unit[labelled].double()
    sums = x.new_zeros(classes, x.shape[1]).index_add_(0, own, x)
    squares = x.new_zeros(classes).index_add_(0, own, x.square().sum(1))
    sizes = own.bincount(minlength=classes).double()
    distances = (2 * sizes * squares - 2 * sums.square().sum(1)).clamp_min(0).sum()
    pairs = (sizes * (sizes - 1)).sum()
    return float(distances / pairs) if pairs > 0 else float("nan")
