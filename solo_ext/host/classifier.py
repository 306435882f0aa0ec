"""Loss and accuracy of the online classifier, for both hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, the mean over images with a label; 0 if no image has one.

    Args:
        logits: (N, C).
        targets: (N,) classes, -1 for none.

    >>> class_loss(torch.zeros(3, 2), torch.tensor([0, 1, -1]))
    tensor(0.6931)
    >>> class_loss(torch.zeros(3, 2), torch.tensor([-1, -1, -1]))
    tensor(0.)
    """
    loss = F.cross_entropy(logits, targets, ignore_index=-1)
    # The mean over no labels is NaN: replace it by a sum that is 0 and has gradient 0.
    return torch.where((targets != -1).any(), loss, 0 * logits.sum())


@torch.no_grad()
def accuracy_at_k(outputs: Tensor, targets: Tensor, top_k: Sequence[int] = (1, 5)) -> list[Tensor]:
    """Share of rows, in percent, whose target is among the k highest outputs, for every k.

    solo-learn always asks for top 5 and fails with fewer classes; here k is at most the number of
    classes. ``outputs`` is (N, C); ``targets`` (N,), of which -1 never matches; each result is (1,)
    as in solo-learn.

    >>> scores = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1]])
    >>> accuracy_at_k(scores, torch.tensor([1, 1]), top_k=(1, 5))
    [tensor([50.]), tensor([100.])]
    """
    widest = min(max(top_k), outputs.size(1))
    hits = outputs.topk(widest, dim=1).indices == targets.unsqueeze(1)
    counts = hits.cumsum(dim=1).float().sum(dim=0) * (100.0 / targets.size(0))
    return [counts[min(k, widest) - 1].reshape(1) for k in top_k]
