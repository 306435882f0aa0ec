"""Image retrieval by cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from solo_ext.memory.knn import cosines, inverse_norms

_MAX_ELEMENTS = 2**21


@dataclass(frozen=True)
class RetrievalResult:
    """What :func:`retrieval_scores` measured.

    Attributes:
        mean_average_precision: in percent, over the full ranking.
        recall: by k, percentage of the queries with a relevant row among the first k.
        queries: that have a relevant row at all; the others are left out.
    """

    mean_average_precision: float
    recall: dict[int, float]
    queries: int


@torch.no_grad()
def retrieval_scores(
    queries: Tensor,
    targets: Tensor,
    gallery: Tensor | None,
    gallery_targets: Tensor | None,
    ks: Sequence[int],
    device: str | torch.device = "cpu",
) -> RetrievalResult:
    """Ranks a gallery for every query; rows of the query's class are relevant.

    Average precision is ``mean_{relevant r} |{relevant up to rank r}| / rank(r)`` over the whole
    ranking. Equal similarities keep the order of the gallery. Queries come in blocks, so that
    beside the features no more than a bounded table is held.

    Args:
        queries: (n, D).
        targets: (n,) classes.
        gallery: (m, D); ``None``: the queries themselves, each without itself.
        gallery_targets: (m,); ``None`` with ``gallery``.
        ks: ranks for recall; beyond the gallery it is over the whole ranking.
        device: where to compute.

    Raises:
        ValueError: no query has a relevant row.
    """
    alone = gallery is None
    rows = (queries if gallery is None else gallery).to(device)
    labels = (targets if gallery_targets is None else gallery_targets).to(device)
    scale = inverse_norms(rows)
    size = max(1, _MAX_ELEMENTS // len(rows))
    precision = torch.zeros((), dtype=torch.float64, device=device)
    hits = {k: torch.zeros((), dtype=torch.int64, device=device) for k in ks}
    count = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(queries), size):
        block = queries[start : start + size].to(device)
        similarity = cosines(block, rows, scale)
        if alone:
            own = torch.arange(len(block), device=device)
            # Behind everything: it is cut off below.
            similarity[own, start + own] = float("-inf")
        order = similarity.argsort(dim=1, descending=True, stable=True)
        order = order[:, : len(rows) - alone]
        truth = targets[start : start + size].to(device)
        relevant = labels[order] == truth[:, None]
        found = relevant.any(1)
        ranks = torch.arange(1, order.shape[1] + 1, device=device)
        share = relevant.cumsum(1) / ranks
        average = (share * relevant).sum(1, dtype=torch.float64) / relevant.sum(1).clamp_min(1)
        precision += average.sum()
        count += found.sum()
        for k in ks:
            hits[k] += relevant[:, :k].any(1).sum()
    total = int(count)
    if not total:
        raise ValueError("no query shares its class with a row of the gallery")
    return RetrievalResult(
        mean_average_precision=100 * float(precision) / total,
        recall={k: 100 * int(hit) / total for k, hit in hits.items()},
        queries=total,
    )
