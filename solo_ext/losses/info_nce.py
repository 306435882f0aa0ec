"""InfoNCE against given negatives, a queue for example."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.core import contrastive
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "info_nce_loss_func",
    paper="Momentum Contrast for Unsupervised Visual Representation Learning",
    year=2019,
    arxiv="1911.05722",
)
def info_nce_loss_func(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    temperature: float = 0.2,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross-entropy of each query's positive against negatives that all queries share.

    ``-log(exp(q.k+ / T) / (exp(q.k+ / T) + sum_j exp(q.n_j / T)))``, mean over the queries
    (Eq. 1).

    Args:
        query: (N, D); normalised inside.
        positive: (N, D), row i is of query i; normalised inside.
        negatives: (K, D), unit rows, used as they are; K may be 0.
        temperature: T, above 0.
        compute_dtype: of the factors of the products with constant negatives, ``torch.bfloat16``
            for example; fp32 by default.

    Returns:
        Scalar; zero that carries the graph without negatives.

    Raises:
        ValueError: shapes do not fit, or the temperature is not positive.

    Source:
        He et al., CVPR 2020, arXiv 1911.05722; van den Oord et al., 2018, arXiv 1807.03748.
    """
    shapes(query, positive, negatives)
    with full_precision_products(query.device):
        query, positive = (F.normalize(x, dim=1) for x in full_precision(query, positive))
    return contrastive(
        query,
        positive.unsqueeze(1),
        negatives,
        temperature=temperature,
        compute_dtype=compute_dtype,
    ).loss


def shapes(query: Tensor, positive: Tensor, negatives: Tensor) -> None:
    """Refuses what does not fit together.

    Raises:
        ValueError: with the shapes.
    """
    if query.ndim != 2 or query.shape != positive.shape:
        raise ValueError(
            f"query and positive must both be (N, D), got {tuple(query.shape)} and "
            f"{tuple(positive.shape)}"
        )
    if negatives.ndim != 2 or negatives.shape[1] != query.shape[1]:
        raise ValueError(
            f"negatives must be (K, {query.shape[1]}) like the query, got {tuple(negatives.shape)}"
        )
