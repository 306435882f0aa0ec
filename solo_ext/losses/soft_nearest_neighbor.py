"""Soft nearest neighbour loss."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.distances import pairwise_distances
from solo_ext.losses.pairs import class_pairs, joined_mean, keep
from solo_ext.losses.registry import LOSSES

Distance = Literal["sqeuclidean", "cosine"]


@LOSSES.register(
    "soft_nearest_neighbor_loss_func",
    paper="Analyzing and Improving Representations with the Soft Nearest Neighbor Loss",
    year=2019,
    arxiv="1902.01889",
)
def soft_nearest_neighbor_loss_func(
    x: Tensor, targets: Tensor, temperature: float = 1.0, distance: Distance = "sqeuclidean"
) -> Tensor:
    """How unlikely a row's neighbour, drawn by distance, is of the row's own class.

    ``-log(sum_{j in P(i)} exp(-f_ij / T) / sum_{k != i} exp(-f_ik / T))``, P(i) the other rows of
    the class of i in the joined batch; mean over the rows whose P(i) is not empty (Eq. 1, in
    which none is).

    Args:
        x: (N, D), any scale, compared with the rows of all processes.
        targets: (N,) integers, the classes.
        temperature: T, above 0.
        distance: f; ``sqeuclidean``: the squared Euclidean distance of the raw rows;
            ``cosine``: minus the cosine.

    Returns:
        Scalar; zero that carries the graph where no row has a positive, or none a negative.

    Raises:
        ValueError: shapes do not fit, or a setting is not one of the above.

    Source:
        Frosst et al., ICML 2019, arXiv 1902.01889.
    """
    _check(x, targets, temperature, distance)
    (x,) = full_precision(x)
    with full_precision_products(x.device):
        if distance == "cosine":
            x = F.normalize(x, dim=1)
            logits = x @ distributed.gather_with_gradient(x).T / temperature
        else:
            distances = pairwise_distances(x, distributed.gather_with_gradient(x))
            logits = -distances.square() / temperature
        positive, negative = class_pairs(targets)
        advantage = keep(logits, positive).logsumexp(1) - keep(logits, negative).logsumexp(1)
        counted = positive.any(1)
        # Without negatives the neighbour is certain to be of the class.
        loss = torch.where(counted & negative.any(1), -F.logsigmoid(advantage), 0.0)
        return joined_mean(loss.sum(), counted.sum())


def _check(x: Tensor, targets: Tensor, temperature: float, distance: str) -> None:
    if x.ndim != 2 or targets.shape != x.shape[:1]:
        raise ValueError(
            f"x must be (N, D) and targets (N,), got {tuple(x.shape)} and {tuple(targets.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    if distance not in ("sqeuclidean", "cosine"):
        raise ValueError(f"distance={distance!r}: must be 'sqeuclidean' or 'cosine'")
