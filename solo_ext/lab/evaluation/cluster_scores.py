"""Scores of clusters without labels: how separate they are, and how granularities agree."""

from __future__ import annotations

import torch
from sklearn.metrics import adjusted_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor


@torch.no_grad()
def simplified_silhouette(x: Tensor, centroids: Tensor, assignments: Tensor) -> Tensor:
    """How much nearer each row is to its own centroid than to any other.

    ``s_i = (b_i - a_i) / max(a_i, b_i)``, with the distance ``a_i`` to the row's own centroid and
    ``b_i`` to the nearest other one. The silhouette of Rousseeuw (1987) has mean distances to all
    members in their place (Hruschka, Campello and de Castro, "Evolving clusters in gene-expression
    data", Information Sciences 2006). A row that is alone in its cluster has 0, as there.

    Args:
        x: (N, D).
        centroids: (K, D). A cluster without members is left out.
        assignments: (N,) int64, the cluster of every row.

    Returns:
        (N,), in [-1, 1] and without unit: 1 at the own centroid, 0 between two, below 0 for a row
        that is nearer to another one. NaN if fewer than two clusters have members.

    Example:
        >>> x = torch.tensor([[0.0], [2.0], [8.0], [12.0]])
        >>> simplified_silhouette(x, torch.tensor([[1.0], [10.0]]), torch.tensor([0, 0, 1, 1]))
        tensor([0.9000, 0.8750, 0.7143, 0.8182])
    """
    sizes = assignments.bincount(minlength=len(centroids))
    if int((sizes > 0).sum()) < 2:
        return x.new_full((len(x),), float("nan"))
    distances = torch.cdist(x, centroids, compute_mode="donot_use_mm_for_euclid_dist")
    distances = distances.masked_fill(sizes == 0, float("inf"))
    own = distances.gather(1, assignments[:, None])[:, 0]
    other = distances.scatter(1, assignments[:, None], float("inf")).amin(1)
    larger = torch.maximum(own, other)
    score = torch.where(larger > 0, (other - own) / larger, 0.0)
    return score.masked_fill(sizes[assignments] == 1, 0.0)


def granularity_agreement(fine: Tensor, coarse: Tensor) -> dict[str, float]:
    """Agreement of two clusterings of the same rows.

    - ``ami``: adjusted mutual information, ``(I - E[I]) / ((H_fine + H_coarse) / 2 - E[I])``, with
      the expectation over random clusterings of these sizes (Vinh, Epps and Bailey, JMLR 2010);
      at most 1, 0 for independent ones, 1 for equal ones.
    - ``nested``: ``1/N sum_f max_c |f & c|``, the share of rows in the coarse cluster that most of
      their fine cluster is in; above 0, 1 if every fine cluster lies in one coarse cluster. This
      is the purity of the fine clusters.

    Args:
        fine: (N,) the fine cluster of every row.
        coarse: (N,) the coarse cluster of every row.

    Example:
        >>> fine, coarse = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 0, 0, 1, 1])
        >>> granularity_agreement(fine, coarse)["nested"]
        1.0
    """
    of_fine, of_coarse = fine.cpu().numpy(), coarse.cpu().numpy()
    table = contingency_matrix(of_fine, of_coarse)
    return {
        "ami": float(adjusted_mutual_info_score(of_fine, of_coarse)),
        "nested": float(table.max(axis=1).sum() / table.sum()),
    }
