"""How evenly rows cover the sphere."""

from __future__ import annotations

import math

from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision
from solo_ext.losses.distances import pairwise_distances
from solo_ext.losses.pairs import own_pairs
from solo_ext.losses.registry import LOSSES


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
    """
    if x.ndim != 2:
        raise ValueError(f"x must be (N, D), got {tuple(x.shape)}")
    if not t > 0:
        raise ValueError(f"t={t}: must be above 0")
    (x,) = full_precision(x)
    potentials = -t * pairwise_distances(x, distributed.gather_with_gradient(x)).square()
    rows, total = potentials.shape
    if total == 1:
        return potentials.sum()
    own = own_pairs(rows, x.device)
    masses = potentials.masked_fill(own, float("-inf")).logsumexp(1)
    mass = distributed.gather_with_gradient(masses).logsumexp(0)
    return mass - math.log(total * (total - 1))
