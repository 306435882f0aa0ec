"""Contrastive loss of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.core.precision import full_precision
from solo_ext.losses.distances import row_distances
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "contrastive_loss_func",
    paper="Dimensionality Reduction by Learning an Invariant Mapping",
    year=2006,
)
def contrastive_loss_func(x: Tensor, y: Tensor, same: Tensor, margin: float = 1.0) -> Tensor:
    """Pulls the pairs of one class together and pushes the others a margin apart.

    ``d^2`` for a pair of one class, ``max(0, margin - d)^2`` for another, d the Euclidean
    distance; mean over the pairs (Eq. 4 without its factor 1/2).

    Args:
        x: (N, D), any scale.
        y: (N, D), any scale; row i is paired with row i of ``x``.
        same: (N,) bool, whether the pair is of one class.
        margin: distance that pairs of two classes shall have, at least 0.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes do not fit, or the margin is negative.

    Source:
        Hadsell, Chopra and LeCun, CVPR 2006.
    """
    _check(x, y, same, margin)
    x, y = full_precision(x, y)
    distances = row_distances(x, y)
    apart = (margin - distances).relu()
    return torch.where(same.bool(), distances, apart).square().mean()


def _check(x: Tensor, y: Tensor, same: Tensor, margin: float) -> None:
    if x.ndim != 2 or x.shape != y.shape:
        raise ValueError(f"x and y must both be (N, D), got {tuple(x.shape)} and {tuple(y.shape)}")
    if same.shape != x.shape[:1]:
        raise ValueError(f"same must be ({x.shape[0]},), one per pair, got {tuple(same.shape)}")
    if not margin >= 0:
        raise ValueError(f"margin={margin}: must be at least 0")
