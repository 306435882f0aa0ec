"""Pairs of local rows with the rows of the joined batch, and means over such pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.core import distributed


def own_pairs(rows: int, device: torch.device) -> Tensor:
    """(N, G) bool, whether column j is local row i itself; G rows on all ranks together."""
    columns = torch.arange(rows * distributed.world_size(), device=device)
    places = torch.arange(rows, device=device) + distributed.rank() * rows
    return places.unsqueeze(1) == columns


def class_pairs(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which columns of the joined batch are of a local row's class.

    Args:
        targets: (N,) integers, the classes of the local rows.

    Returns:
        ``positive`` and ``negative``, (N, G) bool: of the same class without the row itself, and
        of another class.
    """
    same = targets.unsqueeze(1) == distributed.gather(targets)
    return same & ~own_pairs(targets.shape[0], targets.device), ~same


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Values for a maximum or log-sum-exp over the masked entries of each row.

    Args:
        values: (N, G).
        mask: (N, G) bool.

    Returns:
        (N, G), minus infinity outside the mask. A row without any entry is 0 throughout and gets
        no gradient; left at minus infinity it would pass NaN on, if only to where it is masked.
    """
    kept = values.masked_fill(~mask, float("-inf"))
    return kept.masked_fill(~mask.any(1, keepdim=True), 0.0)


def joined_mean(total: Tensor, count: Tensor) -> Tensor:
    """This rank's share of a mean over the joined batch.

    Args:
        total: scalar sum over this rank's terms, with gradient.
        count: scalar, number of these terms.

    Returns:
        Scalar whose mean over ranks, which DDP takes, is the sum of all terms over their number;
        0 where there are none.
    """
    counts = distributed.gather(count.reshape(1)).sum().clamp(min=1)
    return distributed.world_size() * total / counts
