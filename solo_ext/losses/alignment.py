"""Alignment of positive pairs and uniformity of all rows on the sphere."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision
from solo_ext.losses.common import LOSSES, check_positive, check_rows
from solo_ext.losses.metric import own_pairs, pairwise_distances, row_distances


@LOSSES.register(
    "alignment_loss_func",
    paper="Understanding Contrastive Representation Learning through Alignment and Uniformity "
    "on the Hypersphere",
    year=2020,
    arxiv="2005.10242",
)
def alignment_loss_func(x: Tensor, y: Tensor, alpha: float = 2) -> Tensor:
    """Mean distance of positive pairs, to a power.

    ``|x_i - y_i|^alpha``, mean over the pairs.

    Args:
        x: (N, D), of unit length in the paper; used as it is.
        y: (N, D), row i is paired with row i of ``x``.
        alpha: above 0.

    Returns:
        Scalar. Equal rows have gradient 0.

    Raises:
        ValueError: shapes differ or are not (N, D), or alpha is not positive.

    Source:
        Wang and Isola, ICML 2020, arXiv 2005.10242.

    Example:
        >>> alignment_loss_func(torch.eye(3), -torch.eye(3))
        tensor(4.)
    """
    check_rows(x=x, y=y)
    check_positive(alpha=alpha)
    x, y = full_precision(x, y)
    distances = row_distances(x, y)
    # Below 1 the slope of the power at 0 is infinite.
    apart = distances > 0
    powers = torch.where(apart, distances, 1.0).pow(alpha)
    return torch.where(apart, powers, 0.0).mean()


@LOSSES.register(
    "uniformity_loss_func",
    paper="Understanding Contrastive Representation Learning through Alignment and Uniformity "
    "on the Hypersphere",
    year=2020,
    arxiv="2005.10242",
)
def uniformity_loss_func(x: Tensor, t: float = 2) -> Tensor:
    """Logarithm of the mean Gaussian potential of all pairs.

    ``log mean_{i < j} exp(-t |x_i - x_j|^2)`` over the pairs of the joined batch; the same on
    every process.

    Args:
        x: (N, D), of unit length in the paper; used as it is.
        t: above 0.

    Returns:
        Scalar, at most 0; zero that carries the graph for a single row.

    Raises:
        ValueError: x is not (N, D), or t is not positive.

    Source:
        Wang and Isola, ICML 2020, arXiv 2005.10242.

    Example:
        >>> uniformity_loss_func(torch.eye(3))  # all pairs have the squared distance 2
        tensor(-4.0000)
    """
    check_rows(x=x)
    check_positive(t=t)
    (x,) = full_precision(x)
    potentials = -t * pairwise_distances(x, distributed.gather_with_gradient(x)).square()
    total = potentials.shape[1]
    if total == 1:
        return potentials.sum()
    masses = potentials.masked_fill(own_pairs(x), float("-inf")).logsumexp(1)
    mass = distributed.gather_with_gradient(masses).logsumexp(0)
    return mass - math.log(total * (total - 1))
