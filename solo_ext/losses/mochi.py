"""MoCHi: InfoNCE with synthetic negatives, mixed from the hardest negatives in a queue."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels.mixed_logsumexp import MixDraws
from solo_ext.losses.common import LOSSES, check_not_negative, check_table, unit_rows
from solo_ext.losses.contrastive import Mixing, contrastive


def plain_mochi(
    query: Tensor,
    positive: Tensor,
    queue: Tensor,
    num_hard: int,
    draws: MixDraws,
    temperature: float,
) -> Tensor:
    """The loss of unit rows with all synthetic negatives in memory (Eq. 4, 5); the reference.

    Example:
        >>> query, key, queue = (F.normalize(torch.randn(n, 8)) for n in (4, 4, 100))
        >>> plain_mochi(query, key, queue, 16, draw_mixes(query, 16, 5, 2), temperature=0.2).shape
        torch.Size([])
    """
    pairs, alpha, singles, beta = draws
    with torch.no_grad():
        hardest = (query @ queue.T).topk(num_hard, dim=1).indices  # (N, num_hard)
        i, j, k = (hardest.gather(1, x.long()) for x in (*pairs.unbind(2), singles))
        a, b = alpha.unsqueeze(2), beta.unsqueeze(2)
        of_pairs = F.normalize(a * queue[i] + (1 - a) * queue[j], dim=2)  # (N, s, D)
        with_query = F.normalize(b * query.unsqueeze(1) + (1 - b) * queue[k], dim=2)  # (N, s', D)
        synthetic = torch.cat((of_pairs, with_query), dim=1)
    own = (query * positive).sum(1, keepdim=True)
    logits = torch.cat((own, query @ queue.T, torch.einsum("nd,nsd->ns", query, synthetic)), 1)
    return F.cross_entropy(logits / temperature, torch.zeros_like(own[:, 0]).long())


def draw_mixes(
    anchors: Tensor,
    num_hard: int,
    num_pair_mixes: int,
    num_query_mixes: int,
    generator: torch.Generator | None = None,
) -> MixDraws:
    """Draws uniformly which negatives to mix, and the coefficients.

    The two negatives of a pair are different if there is more than one.

    Args:
        anchors: (N, D); only their number, device and dtype are used.
        num_hard: number of hardest negatives of each anchor to mix from, above 0.
        num_pair_mixes: s, number of mixtures of two negatives.
        num_query_mixes: s', number of mixtures of a negative with the anchor.
        generator: of the anchors' device; the global one by default.

    Example:
        >>> [tuple(x.shape) for x in draw_mixes(torch.randn(4, 8), 16, 5, 2)]
        [(4, 5, 2), (4, 5), (4, 2), (4, 2)]
    """
    rows, device = len(anchors), anchors.device
    dtype = torch.float64 if anchors.dtype == torch.float64 else torch.float32

    def indices(columns: int, below: int) -> Tensor:
        # int32 halves the memory: there are thousands of indices per anchor.
        return torch.randint(
            below, (rows, columns), generator=generator, device=device, dtype=torch.int32
        )

    def shares(columns: int) -> Tensor:
        drawn = torch.rand((rows, columns), generator=generator, device=device, dtype=dtype)
        return drawn.clamp_(min=torch.finfo(dtype).tiny)

    first = indices(num_pair_mixes, num_hard)
    second = first
    if num_hard > 1:
        second = (indices(num_pair_mixes, num_hard - 1).add_(first).add_(1)).remainder_(num_hard)
    pairs = torch.stack((first, second), 2)
    alpha, single = shares(num_pair_mixes), indices(num_query_mixes, num_hard)
    return MixDraws(pairs, alpha, single, shares(num_query_mixes) / 2)


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
    """InfoNCE against a queue and, for each query, mixtures of its hardest negatives.

    ``-log(exp(q.k / T) / (exp(q.k / T) + sum_n exp(q.n / T) + sum_h exp(q.h / T)))``, n over the
    queue, h over ``s`` mixtures ``alpha n_i + (1 - alpha) n_j`` (Eq. 4) and ``s'`` mixtures
    ``beta q + (1 - beta) n_j`` (Eq. 5) of the ``num_hard`` rows most similar to the query; mean
    over the queries (Kalantidis et al., NeurIPS 2020). Mixtures are normalised, and constants.

    Args:
        query: (N, D); normalised inside.
        positive: (N, D), row i belongs to query i; normalised inside.
        queue: (K, D) unit rows, not normalised again; K may be 0.
        temperature: T, above 0.
        num_hard: number of hardest rows to mix from; the whole queue if it is shorter.
        num_pair_mixes: s, 0 or more.
        num_query_mixes: s', 0 or more. With ``s = s' = 0`` the loss is InfoNCE.
        draws: coefficients of the mixtures, and indices, where 0 is the query's hardest row; they
            determine ``s`` and ``s'``. By default drawn at random in each call.

    Example:
        >>> query, key, queue = (F.normalize(torch.randn(n, 8)) for n in (4, 4, 100))
        >>> draws = draw_mixes(query, 16, num_pair_mixes=5, num_query_mixes=2)
        >>> mochi_loss_func(query, key, queue, num_hard=16, draws=draws).allclose(
        ...     plain_mochi(query, key, queue, 16, draws, temperature=0.2)
        ... )
        True
    """
    query, positive = unit_rows(query=query, positive=positive)
    check_table("queue", queue, query)
    check_not_negative(num_pair_mixes=num_pair_mixes, num_query_mixes=num_query_mixes)
    ranked = draws is not None
    if draws is None:
        mined = max(min(num_hard, len(queue)), 1)
        draws = draw_mixes(query, mined, num_pair_mixes, num_query_mixes)
    mixing, positives = Mixing(num_hard, draws, ranked), positive.unsqueeze(1)
    return contrastive(query, positives, queue, mixing=mixing, temperature=temperature).loss
