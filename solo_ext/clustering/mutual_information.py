"""How much clusters and classes say of each other."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solo_ext.core.distributed import rank, rank_barrier, sum_over_ranks, world_size

# Samples that are looked at together.
_BLOCK = 2**22


@torch.no_grad()
def normalized_mutual_information(assignments: Tensor, labels: Tensor) -> float:
    """Mutual information of clusters and classes over the mean of their entropies.

    ``2 (H(A) + H(B) - H(A, B)) / (H(A) + H(B))``, in fp64; 1 for one cluster and one class. Every
    rank counts the pairs of the clusters that fall to it, and the ranks sum a single number.

    Args:
        assignments: (n,) int64 clusters from 0 on, n > 0; the same on every rank.
        labels: (n,) integers from 0 on, on the CPU; the same on every rank.

    Returns:
        A number in [0, 1], up to rounding that of scikit-learn's ``normalized_mutual_info_score``.

    Raises:
        RankError: Another rank failed.
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
    """A number for the cluster and the class of each sample in the clusters of this rank."""
    own, ranks = rank(), world_size()
    found = []
    blocks = torch.split(assignments, _BLOCK), torch.split(labels, _BLOCK)
    for given, classes in zip(*blocks, strict=True):
        here = (given % ranks == own).nonzero()[:, 0]
        clusters = given.index_select(0, here).cpu()
        found.append(clusters * num_classes + classes.index_select(0, here.cpu()))
    return torch.cat(found).numpy()


def _entropy(counts: NDArray[np.int64], total: int) -> float:
    """What groups of these sizes add to the entropy of ``total`` samples."""
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum())
