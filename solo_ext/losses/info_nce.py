"""InfoNCE against given negatives, a queue for example."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision_products
from solo_ext.kernels.tables import table_logsumexp
from solo_ext.losses.common import LOSSES, check_positive, check_table, unit_rows


def plain_info_nce(
    query: Tensor, positive: Tensor, negatives: Tensor, temperature: float
) -> Tensor:
    """Eq. 1 on the (N, 1 + K) matrix of logits, of unit rows."""
    own = (query * positive).sum(1, keepdim=True)
    logits = torch.cat((own, query @ negatives.T), dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long, device=query.device))


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

    Example:
        >>> query, key = torch.randn(4, 16), torch.randn(4, 16)
        >>> queue = F.normalize(torch.randn(1000, 16))
        >>> loss = info_nce_loss_func(query, key, queue, temperature=0.2)
        >>> query, key = (F.normalize(x) for x in (query, key))
        >>> loss.allclose(plain_info_nce(query, key, queue, temperature=0.2))
        True
    """
    query, positive = unit_rows(query=query, positive=positive)
    check_table("negatives", negatives, query)
    check_positive(temperature=temperature)
    negatives = negatives.to(query.dtype)
    with full_precision_products(query.device):
        if negatives.requires_grad:
            if compute_dtype is not None:
                raise ValueError(
                    f"compute_dtype={compute_dtype}: is for constant negatives; leave it out"
                )
            return plain_info_nce(query, positive, negatives, temperature)
        lse, _ = table_logsumexp(
            query, negatives, 1 / temperature, bound=1 / temperature, compute_dtype=compute_dtype
        )
        # log(1 + exp(lse - s)), which is the cross-entropy.
        return F.softplus(lse[0] - (query * positive).sum(1) / temperature).mean()
