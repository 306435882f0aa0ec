"""Similarities of two augmented views to every sample of the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext import distributed
from solo_ext.losses.precision import full_precision, full_precision_products


class InBatchLogits(NamedTuple):
    """What an in-batch contrastive loss starts from.

    Attributes:
        positive: (2N,) cosine of each anchor to its other view, over the temperature.
        negatives: (2N, 2G) cosines to all candidates over the temperature, minus infinity at
            the anchor itself and at its positive.
        num_negatives: 2G - 2.
    """

    positive: Tensor
    negatives: Tensor
    num_negatives: int


def in_batch_logits(z1: Tensor, z2: Tensor, temperature: float) -> InBatchLogits:
    """Compares the local anchors of both views with the candidates of all ranks.

    Candidates are both views of the joined batch, gathered with gradient, so that two
    processes give the loss of one on the joined batch.

    Args:
        z1: (N, D) first view, any scale.
        z2: (N, D) second view, any scale.
        temperature: above 0.

    Returns:
        The logits, in fp32 (fp64 for fp64 input), G = N * number of processes.

    Raises:
        ValueError: shapes differ or are not (N, D), or the temperature is not positive.
    """
    if z1.ndim != 2 or z1.shape != z2.shape:
        raise ValueError(
            f"z1 and z2 must both be (N, D), got {tuple(z1.shape)} and {tuple(z2.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    with full_precision_products(z1.device):
        local = F.normalize(torch.stack(full_precision(z1, z2)), dim=-1)
        # (N, 2, D) gathers rank by rank; (2, G, D) keeps each view's rows together.
        joined = distributed.gather_with_gradient(local.transpose(0, 1)).transpose(0, 1)
        count, total = z1.shape[0], joined.shape[1]
        logits = local.flatten(0, 1) @ joined.flatten(0, 1).T / temperature
        first = torch.arange(count, device=z1.device) + distributed.rank() * count
        own = torch.cat((first, first + total)).unsqueeze(1)
        other = torch.cat((first + total, first)).unsqueeze(1)
        positive = logits.gather(1, other).squeeze(1)
        negatives = logits.scatter(1, torch.cat((own, other), 1), float("-inf"))
    return InBatchLogits(positive, negatives, 2 * total - 2)
