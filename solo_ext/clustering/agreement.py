"""Agreement of two groupings of the same samples."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from solo_ext.core.distributed import rank, rank_barrier, sum_over_ranks, world_size

# Number of samples that are counted at a time.
_COUNTED = 2**18


@torch.no_grad()
def match_clusters(old_assignments: Tensor, new_assignments: Tensor, num_classes: int) -> Tensor:
    """One-to-one matching of new clusters to old ones with the largest common membership.

    The permutation ``m`` that maximises ``sum_c |{i: new_i = c, old_i = m(c)}|``, found by the
    Hungarian method on the (C, C) table of counts. Time grows at worst as C^3: some seconds for
    10,000 clusters. Besides the table it holds one block of the samples at a time.

    Args:
        old_assignments: (n,) integers in [0, C), or -1 for a sample without a cluster.
        new_assignments: (n,) integers in [0, C), or -1; the same samples in the same order.
        num_classes: C, at least 1; either clustering may leave clusters empty.

    Returns:
        (C,) int64, the old cluster of each new one, on the device of ``old_assignments``.

    Raises:
        ValueError: shapes differ, or a cluster number or C is out of range.

    Example:
        >>> match_clusters(torch.tensor([0, 0, 1, 2]), torch.tensor([2, 2, 0, 1]), 3)
        tensor([1, 2, 0])
    """
    _check(old_assignments, new_assignments, num_classes)
    device = old_assignments.device
    # The extra cell counts samples that lack a cluster.
    counts = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=device)
    blocks = torch.split(old_assignments, _COUNTED), torch.split(new_assignments, _COUNTED)
    for old, new in zip(*blocks, strict=True):
        old, new = old.long(), new.to(device).long()
        cells = (new * num_classes + old).where((old >= 0) & (new >= 0), num_classes**2)
        counts.index_add_(0, cells, torch.ones_like(cells))
    table = counts[:-1].view(num_classes, num_classes)
    _, match = linear_sum_assignment(table.cpu().numpy(), maximize=True)
    return torch.as_tensor(match, dtype=torch.int64, device=device)


def _check(old: Tensor, new: Tensor, num_classes: int) -> None:
    if old.ndim != 1 or old.shape != new.shape:
        raise ValueError(
            f"old_assignments and new_assignments have the shapes {tuple(old.shape)} and "
            f"{tuple(new.shape)}; pass one of each per sample, (n,)"
        )
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes}: must be at least 1")
    for name, values in (("old_assignments", old), ("new_assignments", new)):
        if len(values):
            low, high = int(values.min()), int(values.max())
            if low < -1 or high >= num_classes:
                raise ValueError(
                    f"{name} lie in [{low}, {high}]; they must lie in [0, {num_classes - 1}], or "
                    "be -1 for a sample without a cluster"
                )


# Number of samples that are compared at a time.
_PAIRED = 2**22


@torch.no_grad()
def normalized_mutual_information(assignments: Tensor, labels: Tensor) -> float:
    """Mutual information of clusters and classes over the mean of their entropies.

    ``2 (H(A) + H(B) - H(A, B)) / (H(A) + H(B))``, in fp64; 1 for one cluster and one class. Every
    rank counts the pairs of its share of the clusters, and the ranks then sum one number.

    Args:
        assignments: (n,) int64 clusters from 0 on, n > 0; the same on every rank.
        labels: (n,) integers from 0 on, on the CPU; the same on every rank.

    Returns:
        A number in [0, 1]; up to rounding scikit-learn's ``normalized_mutual_info_score``.

    Raises:
        RankError: Another rank failed.

    Example:
        >>> normalized_mutual_information(torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]))
        1.0
    """
    sizes, classes = torch.bincount(assignments).cpu().numpy(), torch.bincount(labels).numpy()
    if (sizes > 0).sum() == (classes > 0).sum() == 1:
        return 1.0
    pairs = np.unique(_pairs(assignments, labels, len(classes)), return_counts=True)[1]
    joint = torch.tensor(_entropy(pairs, len(labels)), dtype=torch.float64)
    joint = joint.to(assignments.device)
    rank_barrier(joint.device)
    apart = _entropy(sizes, len(labels)) + _entropy(classes, len(labels))
    return max(0.0, 2 * (1 - float(sum_over_ranks(joint)) / apart))


def _pairs(assignments: Tensor, labels: Tensor, num_classes: int) -> NDArray[np.int64]:
    """One number per (cluster, class) pair, for the samples in this rank's share of clusters."""
    own, ranks = rank(), world_size()
    found = []
    blocks = torch.split(assignments, _PAIRED), torch.split(labels, _PAIRED)
    for given, classes in zip(*blocks, strict=True):
        here = (given % ranks == own).nonzero()[:, 0]
        clusters = given.index_select(0, here).cpu()
        found.append(clusters * num_classes + classes.index_select(0, here.cpu()))
    return torch.cat(found).numpy()


def _entropy(counts: NDArray[np.int64], total: int) -> float:
    """Contribution of groups of these sizes to the entropy of ``total`` samples."""
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum())
