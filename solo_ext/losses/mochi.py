"""MoCHi: InfoNCE with synthetic hard negatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels import MixDraws
from solo_ext.losses.contrastive import contrastive, shapes
from solo_ext.losses.registry import LOSSES


@dataclass(frozen=True)
class Mixing:
    """Synthetic negatives of MoCHi (Kalantidis et al., NeurIPS 2020, arXiv 2010.01028).

    Args:
        num_hard: candidates most similar to the anchor, which are mixed; all where there are
            fewer.
        draws: what is mixed with what; see :func:`draw_mixes`.
        ranked: whether the draws mean the candidates from the hardest down; random ones need not.

    Raises:
        ValueError: ``num_hard`` is not positive, or the draws' shapes do not fit together.
    """

    num_hard: int
    draws: MixDraws
    ranked: bool = True

    def __post_init__(self) -> None:
        if self.num_hard < 1:
            raise ValueError(f"num_hard={self.num_hard}: must be above 0")
        pairs, alpha, singles, beta = (tuple(x.shape) for x in self.draws)
        # Their values would have to be waited for.
        if pairs != (*alpha, 2) or singles != beta or len(alpha) != 2 or alpha[0] != beta[0]:
            raise ValueError(
                f"draws={pairs}, {alpha}, {singles}, {beta}: must be (N, s, 2), (N, s), (N, s') "
                "and (N, s')"
            )

    @property
    def count(self) -> int:
        """Synthetic negatives of each anchor."""
        return self.draws.alpha.shape[1] + self.draws.beta.shape[1]


def draw_mixes(
    anchors: Tensor,
    num_hard: int,
    num_pair_mixes: int,
    num_query_mixes: int,
    generator: torch.Generator | None = None,
) -> MixDraws:
    """Draws uniformly which negatives are mixed and how; a pair is of two different ones.

    Args:
        anchors: (N, D), for number, device and dtype.
        num_hard: mined negatives of each anchor, above 0.
        num_pair_mixes: s, mixtures of two of them.
        num_query_mixes: s', mixtures of one with the anchor.
        generator: of the anchors' device; the global one by default.
    """
    rows, place = anchors.shape[0], anchors.device
    dtype = torch.float64 if anchors.dtype == torch.float64 else torch.float32

    def whole(columns: int, below: int) -> Tensor:
        # Half the memory of the usual integers; there are thousands for each anchor.
        lots = torch.int32
        return torch.randint(below, (rows, columns), generator=generator, device=place, dtype=lots)

    def real(columns: int) -> Tensor:
        lots = torch.rand((rows, columns), generator=generator, device=place, dtype=dtype)
        return lots.clamp_(min=torch.finfo(dtype).tiny)

    first = whole(num_pair_mixes, num_hard)
    second = first
    if num_hard > 1:
        second = (whole(num_pair_mixes, num_hard - 1).add_(first).add_(1)).remainder_(num_hard)
    pairs = torch.stack((first, second), 2)
    alpha, single = real(num_pair_mixes), whole(num_query_mixes, num_hard)
    return MixDraws(pairs, alpha, single, real(num_query_mixes) / 2)


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
