"""``eval clustering``: k-means of the features against the classes."""

from __future__ import annotations

import statistics
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch.nn.functional as F
from annotated_types import Gt
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor

from solo_ext.clustering import kmeans
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import PositiveInt
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.protocol import FeatureProtocol, Row


def _cluster_scores(targets: Tensor, assignments: Tensor) -> dict[str, float]:
    """Agreement of clusters with classes, in percent.

    Args:
        targets: (n,) classes.
        assignments: (n,) clusters; there may be more or fewer than classes.

    Returns:
        ``nmi``, normalised mutual information by the arithmetic mean of the entropies; ``ari``,
        the adjusted Rand index; ``accuracy`` of the best one-to-one matching of clusters to classes
        (Hungarian method), where rows of unmatched clusters are wrong; ``purity``, the share of
        rows that are of the most frequent class of their cluster.
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


class Clusters(FeatureProtocol):
    """Settings of ``eval clustering``: k-means of L2-normalised features against the classes.

    Without ``k`` there are as many clusters as classes.

    >>> import torch
    >>> y = torch.arange(2).repeat(10)
    >>> rows = torch.eye(2)[y], y
    >>> (row,) = Clusters(seeds=1).measure(Features(rows, rows, ["cat", "dog"]))
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
        if self.k is None and features.num_classes < 2:
            problem = "there is one class, which any clusters agree with"
            raise ConfigError("k", None, problem, "give k")
        unit = F.normalize(rows.float(), dim=1)
        found = []
        for place, k in enumerate([features.num_classes] if self.k is None else self.k):
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
