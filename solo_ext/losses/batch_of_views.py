"""Every view of every image against all views of all other images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products


class BatchOfViews(NamedTuple):
    """Views of a batch, as :func:`contrastive` takes them.

    Attributes:
        anchors: (V N, D) this process's views, one after the other.
        positives: (V N, V - 1, D) the other views of each anchor's image.
        candidates: (V G, D) the views of all processes, gathered with gradient.
        own: (V N, V) the columns of each anchor's image.
    """

    anchors: Tensor
    positives: Tensor
    candidates: Tensor
    own: Tensor


def batch_of_views(views: Sequence[Tensor]) -> BatchOfViews:
    """Every view of every image against all views of all other images.

    Args:
        views: V times (N, D), of any scale, V at least 2.

    Raises:
        ValueError: fewer than two views, or shapes that differ or are not (N, D).
    """
    check_views(views)
    with full_precision_products(views[0].device):
        local = F.normalize(torch.stack(full_precision(*views)), dim=-1)
    number, rows = local.shape[:2]
    # (N, V, D) gathers rank by rank; (V, G, D) keeps each view's rows together.
    joined = distributed.gather_with_gradient(local.transpose(0, 1)).transpose(0, 1)
    others = [
        torch.stack([local[u] for u in range(number) if u != v], dim=1) for v in range(number)
    ]
    first = torch.arange(rows, device=local.device) + distributed.rank() * rows
    offsets = torch.arange(number, device=local.device) * joined.shape[1]
    own = (first.unsqueeze(1) + offsets).repeat(number, 1)
    return BatchOfViews(local.flatten(0, 1), torch.cat(others), joined.flatten(0, 1), own)


def check_views(views: Sequence[Tensor]) -> None:
    """Refuses what are no views of one batch.

    Raises:
        ValueError: fewer than two views, or shapes that differ or are not (N, D).
    """
    shapes = [tuple(z.shape) for z in views]
    if len(views) < 2 or len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ValueError(f"at least two views, all (N, D), are needed, got {shapes}")


def own_rows(anchors: Tensor) -> Tensor:
    """(N, 1) columns of this process's rows among those gathered from all processes.

    Args:
        anchors: (N, D), of equal shape on every rank.
    """
    rows = anchors.shape[0]
    first = torch.arange(rows, device=anchors.device) + distributed.rank() * rows
    return first.unsqueeze(1)
