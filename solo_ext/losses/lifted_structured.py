"""Lifted structured loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision
from solo_ext.losses.distances import pairwise_distances
from solo_ext.losses.pairs import class_pairs, joined_mean, keep
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "lifted_structured_loss_func",
    paper="Deep Metric Learning via Lifted Structured Feature Embedding",
    year=2015,
    arxiv="1511.06452",
)
def lifted_structured_loss_func(
    x: Tensor, targets: Tensor, margin: float = 1.0, smooth: bool = True
) -> Tensor:
    """Compares every pair of one class with all negatives of both its ends.

    ``1 / (2 P) sum_(i,j) max(0, J_ij)^2`` over the P unordered pairs of one class in the joined
    batch, with ``J_ij = D_ij + log(sum_k exp(m - D_ik) + sum_l exp(m - D_jl))`` or, not smooth,
    ``J_ij = D_ij + max(max_k (m - D_ik), max_l (m - D_jl))``; D the Euclidean distance, m the
    margin, k and l over the rows of other classes.

    Args:
        x: (N, D), any scale, compared with the rows of all processes.
        targets: (N,) integers, the classes.
        margin: m, finite.
        smooth: whether log-sum-exp takes the place of the maximum.

    Returns:
        Scalar; zero that carries the graph without positive pairs or without negatives.

    Raises:
        ValueError: shapes do not fit, or the margin is not finite.

    Source:
        Oh Song et al., CVPR 2016, arXiv 1511.06452.
    """
    if x.ndim != 2 or targets.shape != x.shape[:1]:
        raise ValueError(
            f"x must be (N, D) and targets (N,), got {tuple(x.shape)} and {tuple(targets.shape)}"
        )
    if not math.isfinite(margin):
        raise ValueError(f"margin={margin}: must be finite")
    (x,) = full_precision(x)
    distances = pairwise_distances(x, distributed.gather_with_gradient(x))
    positive, negative = class_pairs(targets)
    pushes = keep(margin - distances, negative)
    push = pushes.logsumexp(1) if smooth else pushes.amax(1)
    both = torch.logaddexp if smooth else torch.maximum
    push = both(push.unsqueeze(1), distributed.gather_with_gradient(push))
    # Both ends of a positive pair have the same negatives, or both have none.
    counted = positive & negative.any(1, keepdim=True)
    cost = torch.where(counted, distances + push, 0.0).relu().square()
    # Every unordered pair is counted from both its ends, in the sum and in the number.
    return joined_mean(cost.sum(), positive.sum()) / 2
