"""How well clusters agree with classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor


@dataclass(frozen=True)
class ClusterScores:
    """Agreement in percent.

    Attributes:
        nmi: normalised mutual information, arithmetic mean of the entropies.
        ari: adjusted Rand index, about 0 for random clusters.
        accuracy: share of the rows whose cluster is matched to their class.
        purity: share of the rows that are of the commonest class of their cluster.
    """

    nmi: float
    ari: float
    accuracy: float
    purity: float


def cluster_scores(targets: Tensor, assignments: Tensor) -> ClusterScores:
    """Compares clusters with classes.

    The accuracy is that of the one-to-one matching of clusters to classes with the most rows in
    common (the Hungarian method); rows of clusters that are left over count as wrong.

    Args:
        targets: (n,) classes.
        assignments: (n,) clusters; their number need not be that of the classes.
    """
    classes, clusters = targets.cpu().numpy(), assignments.cpu().numpy()
    table = contingency_matrix(classes, clusters)
    matched = table[linear_sum_assignment(table, maximize=True)].sum()
    return ClusterScores(
        nmi=100 * float(normalized_mutual_info_score(classes, clusters)),
        ari=100 * float(adjusted_rand_score(classes, clusters)),
        accuracy=100 * float(matched / table.sum()),
        purity=100 * float(np.max(table, axis=0).sum() / table.sum()),
    )
