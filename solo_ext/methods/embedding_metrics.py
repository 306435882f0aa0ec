"""What the geometry of a batch says about collapse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.geometry import effective_rank
from solo_ext.losses import alignment_loss_func, uniformity_loss_func


@torch.no_grad()
def embedding_metrics(z1: Tensor, z2: Tensor) -> dict[str, Tensor]:
    """Effective rank, alignment and uniformity of two views' embeddings.

    Waits for the device: for the end of an epoch, not for a step.

    Args:
        z1: (N, D), of any scale.
        z2: (N, D), the other views.
    """
    z1, z2 = (F.normalize(z.float(), dim=1) for z in (z1, z2))
    return {
        "train_effective_rank": effective_rank(z1),
        "train_alignment": alignment_loss_func(z1, z2),
        "train_uniformity": uniformity_loss_func(z1),
    }
