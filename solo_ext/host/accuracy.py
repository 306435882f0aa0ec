"""Top-k accuracy for any number of classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def accuracy_at_k(outputs: Tensor, targets: Tensor, top_k: Sequence[int] = (1, 5)) -> list[Tensor]:
    """Share of rows, in percent, whose target is among the k highest outputs.

    solo-learn asks for top 5 wherever it trains a classifier and fails on fewer classes; here k
    is bounded by the number of classes.

    Args:
        outputs: (N, C) scores.
        targets: (N,) class indices; -1 never matches.
        top_k: the values of k.

    Returns:
        One tensor of shape (1,) for each k, as solo-learn's own.
    """
    widest = min(max(top_k), outputs.size(1))
    hits = outputs.topk(widest, dim=1).indices == targets.unsqueeze(1)
    counts = hits.cumsum(dim=1).float().sum(dim=0) * (100.0 / targets.size(0))
    return [counts[min(k, widest) - 1].reshape(1) for k in top_k]
