"""Alignment and uniformity as losses; effective rank and spread as measures of collapse."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
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
    """Mean distance of positive pairs, raised to a power.

    ``|x_i - y_i|^alpha``, mean over the pairs (Wang and Isola, ICML 2020).

    Args:
        x: (N, D), unit rows in the paper; not normalised here.
        y: (N, D), row i is paired with row i of ``x``.
        alpha: above 0.

    Returns:
        Scalar. Equal rows have gradient 0.

    Example:
        >>> alignment_loss_func(torch.eye(3), -torch.eye(3))
        tensor(4.)
    """
    check_rows(x=x, y=y)
    check_positive(alpha=alpha)
    x, y = full_precision(x, y)
    distances = row_distances(x, y)
    # Mask equal rows: for alpha below 1, the gradient of the power is infinite at distance 0.
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

    ``log mean_{i < j} exp(-t |x_i - x_j|^2)`` over the pairs of the joined batch, so that all
    ranks return the same value (Wang and Isola, ICML 2020).

    Args:
        x: (N, D), unit rows in the paper; not normalised here.
        t: above 0.

    Returns:
        Scalar, at most 0; a differentiable zero if the joined batch has a single row.

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


@torch.no_grad()
def effective_rank(x: Tensor) -> Tensor:
    """Effective number of dimensions: the exponential of the entropy of the singular values.

    ``exp(-sum_k p_k log p_k)`` with ``p_k = sigma_k / sum_l sigma_l`` over the singular values of
    x (Eq. 1 of Garrido et al., ICML 2023, arXiv 2210.02885; ``0 log 0 = 0`` in place of an
    epsilon). x is not centred: a mean far from zero counts as a direction. The decomposition takes
    N D min(N, D) operations, and on a GPU the host waits for it.

    Args:
        x: (N, D), of any scale.

    Returns:
        Scalar in [1, min(N, D)] without gradient, fp32 (fp64 for fp64 input): 1 for collapsed and
        for zero rows, about D for many isotropic rows; NaN if any value is not finite.

    Example:
        >>> effective_rank(torch.eye(3))
        tensor(3.)
    """
    check_rows(x=x)
    (x,) = full_precision(x)
    finite = x.isfinite().all()
    # Decompose zeros if a value is not finite: a diverged run should log NaN, not raise here.
    values = torch.linalg.svdvals(torch.where(finite, x, 0))
    share = values / values.sum().clamp(min=torch.finfo(x.dtype).tiny)
    rank = torch.special.entr(share).sum().exp()
    return torch.where(finite, rank, float("nan"))


@torch.no_grad()
def spread(x: Tensor) -> Tensor:
    """Spread of normalised embeddings over the sphere: 0 if they are constant, 1 if isotropic.

    ``sqrt(D) / D * sum_d std_d(x / |x|)``, the standard deviation over the batch, as in section 4.1
    of Chen and He, CVPR 2021, arXiv 2011.10566, which has no factor ``sqrt(D)``.

    Args:
        x: (N, D), of any scale.

    Returns:
        Scalar in [0, 1] without gradient, fp32 (fp64 for fp64 input); NaN for fewer than two rows,
        and if a value is not finite.

    Example:
        >>> spread(torch.eye(3)[[0, 0]])
        tensor(0.)
    """
    check_rows(x=x)
    (x,) = full_precision(x)
    if len(x) < 2:
        return x.new_full((), math.nan)
    return F.normalize(x, dim=1).std(0, correction=0).mean() * math.sqrt(x.shape[1])
