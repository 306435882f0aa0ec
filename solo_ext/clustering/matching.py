"""Which clusters of a new clustering continue which of the old one."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

# Samples that are counted at a time.
_BLOCK = 2**18


@torch.no_grad()
def match_clusters(old_assignments: Tensor, new_assignments: Tensor, num_classes: int) -> Tensor:
    """One-to-one matching of new clusters to old ones with the largest common membership.

    The permutation ``m`` that maximises ``sum_c |{i: new_i = c, old_i = m(c)}|``, found by the
    Hungarian method on the (C, C) table of counts. Time grows as C^3 at worst: some seconds for
    10,000 clusters. Beside the table it holds a block of the samples at a time.

    Args:
        old_assignments: (n,) integers in [0, C), or -1 for a sample that had none.
        new_assignments: (n,) integers in [0, C), or -1; the same samples in the same order.
        num_classes: C, at least 1; both clusterings may leave clusters empty.

    Returns:
        (C,) int64, for each new cluster the old one, on the device of ``old_assignments``.

    Raises:
        ValueError: shapes differ, or a cluster number or C is out of range.
    """
    _check(old_assignments, new_assignments, num_classes)
    device = old_assignments.device
    # The last cell is that of the samples without a cluster.
    counts = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=device)
    blocks = torch.split(old_assignments, _BLOCK), torch.split(new_assignments, _BLOCK)
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
