"""Multi-class N-pair loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "n_pair_loss_func",
    paper="Improved Deep Metric Learning with Multi-class N-pair Loss Objective",
    year=2016,
)
def n_pair_loss_func(anchor: Tensor, positive: Tensor, l2_reg: float = 0.0) -> Tensor:
    """Softmax cross-entropy of each anchor's positive against those of the other pairs.

    ``log(1 + sum_{j != i} exp(a_i.p_j - a_i.p_i))``, mean over the anchors, j over the pairs of
    the joined batch; plus ``l2_reg / 4 (mean |a_i|^2 + mean |p_i|^2)``. Dot products are raw:
    without ``l2_reg`` longer rows alone lower the loss.

    Args:
        anchor: (N, D), any scale.
        positive: (N, D), any scale; pairs of one class count as each other's negatives.
        l2_reg: weight of the squared norms, at least 0.

    Returns:
        Scalar; without ``l2_reg`` zero that carries the graph for a single pair.

    Raises:
        ValueError: shapes differ or are not (N, D), or the weight is negative.

    Source:
        Sohn, NIPS 2016.
    """
    if anchor.ndim != 2 or anchor.shape != positive.shape:
        raise ValueError(
            f"anchor and positive must both be (N, D), got {tuple(anchor.shape)} and "
            f"{tuple(positive.shape)}"
        )
    if not l2_reg >= 0:
        raise ValueError(f"l2_reg={l2_reg}: must be at least 0")
    anchor, positive = full_precision(anchor, positive)
    with full_precision_products(anchor.device):
        logits = anchor @ distributed.gather_with_gradient(positive).T
        rows = anchor.shape[0]
        own = torch.arange(rows, device=anchor.device) + distributed.rank() * rows
        loss = F.cross_entropy(logits, own)
        if l2_reg:
            norms = anchor.square().sum(1) + positive.square().sum(1)
            loss = loss + 0.25 * l2_reg * norms.mean()
        return loss
