"""InfoNCE with synthetic hard negatives."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels import MixDraws
from solo_ext.losses.core import contrastive
from solo_ext.losses.info_nce import shapes
from solo_ext.losses.mixing import Mixing, draw_mixes
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "mochi_loss_func",
    paper="Hard Negative Mixing for Contrastive Learning",
    year=2020,
    arxiv="2010.01028",
)
def mochi_loss_func(
    query: Tensor,
    positive: Tensor,
    queue: Tensor,
    temperature: float = 0.2,
    num_hard: int = 1024,
    num_pair_mixes: int = 1024,
    num_query_mixes: int = 128,
    draws: MixDraws | None = None,
) -> Tensor:
    """InfoNCE against a queue and, for each query, mixtures of its hardest rows.

    ``-log(exp(q.k / T) / (exp(q.k / T) + sum_n exp(q.n / T) + sum_h exp(q.h / T)))``, n over the
    queue, h over ``s`` mixtures ``alpha n_i + (1 - alpha) n_j`` (Eq. 4) and ``s'`` mixtures
    ``beta q + (1 - beta) n_j`` (Eq. 5) of the ``num_hard`` rows most similar to the query,
    normalised, constants to the gradient; mean over the queries.

    Args:
        query: (N, D); normalised inside.
        positive: (N, D), row i is of query i; normalised inside.
        queue: (K, D), unit rows, used as they are; K may be 0.
        temperature: T, above 0.
        num_hard: mined rows; all of the queue where it is shorter.
        num_pair_mixes: s, 0 or more.
        num_query_mixes: s', 0 or more. With ``s = s' = 0`` the loss is InfoNCE.
        draws: what is mixed with what, indices into the query's rows from the hardest down;
            then ``s`` and ``s'`` are those of the draws. Drawn anew by default.

    Returns:
        Scalar; zero that carries the graph without negatives.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.

    Source:
        Kalantidis et al., NeurIPS 2020, arXiv 2010.01028.
    """
    shapes(query, positive, queue)
    for name, value in (("num_pair_mixes", num_pair_mixes), ("num_query_mixes", num_query_mixes)):
        if value < 0:
            raise ValueError(f"{name}={value}: must be 0 or more")
    with full_precision_products(query.device):
        query, positive = (F.normalize(x, dim=1) for x in full_precision(query, positive))
    # Also checks num_hard.
    if draws is not None:
        mixing = Mixing(num_hard, draws)
    else:
        mined = max(min(num_hard, queue.shape[0]), 1)
        made = draw_mixes(query, mined, num_pair_mixes, num_query_mixes)
        mixing = Mixing(num_hard, made, ranked=False)
    return contrastive(
        query, positive.unsqueeze(1), queue, mixing=mixing, temperature=temperature
    ).loss
