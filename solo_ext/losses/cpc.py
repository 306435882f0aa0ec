"""InfoNCE with a bilinear critic, the loss of CPC."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "bilinear_info_nce_loss_func",
    paper="Representation Learning with Contrastive Predictive Coding",
    year=2018,
    arxiv="1807.03748",
)
def bilinear_info_nce_loss_func(
    query: Tensor, context: Tensor, weight: Tensor, temperature: float = 1.0
) -> Tensor:
    """Cross-entropy of each query's own context among the contexts of the joined batch.

    ``-log(f(z_i, c_i) / sum_j f(z_i, c_j))`` with ``f(z, c) = exp(z^T W c / T)`` (Eq. 3 and 4),
    mean over the queries. The paper's sum runs over z for one c: pass ``context, query,
    weight.T`` for that.

    Args:
        query: (N, D1) z, any scale.
        context: (N, D2) c, any scale; row i is of query i.
        weight: (D1, D2) W.
        temperature: T, above 0; the paper has none, which is 1.

    Returns:
        Scalar; zero that carries the graph for a single pair.

    Raises:
        ValueError: shapes do not fit, or the temperature is not positive.

    Source:
        van den Oord et al., 2018, arXiv 1807.03748.
    """
    _check(query, context, weight, temperature)
    query, context, weight = full_precision(query, context, weight)
    with full_precision_products(query.device):
        candidates = distributed.gather_with_gradient(context)
        logits = query @ weight @ candidates.T / temperature
        rows = query.shape[0]
        own = torch.arange(rows, device=query.device) + distributed.rank() * rows
        return F.cross_entropy(logits, own)


def _check(query: Tensor, context: Tensor, weight: Tensor, temperature: float) -> None:
    if query.ndim != 2 or context.ndim != 2 or query.shape[0] != context.shape[0]:
        raise ValueError(
            f"query must be (N, D1) and context (N, D2), got {tuple(query.shape)} and "
            f"{tuple(context.shape)}"
        )
    if weight.shape != (query.shape[1], context.shape[1]):
        raise ValueError(
            f"weight must be ({query.shape[1]}, {context.shape[1]}), from query to context, got "
            f"{tuple(weight.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
