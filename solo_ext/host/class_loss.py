"""The online classifier's loss, which does without labels where there are none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, the mean over images with a label; 0 where none has one.

    Args:
        logits: (N, C).
        targets: (N,) classes, -1 for none.
    """
    loss = F.cross_entropy(logits, targets, ignore_index=-1)
    # A mean over no labels is NaN; its gradient is zero, as that of what stands in for it.
    return torch.where((targets != -1).any(), loss, 0 * logits.sum())
