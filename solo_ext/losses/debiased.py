"""Debiased contrastive loss."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from solo_ext.losses.in_batch import in_batch_logits
from solo_ext.losses.registry import LOSSES


class DebiasedTerms(NamedTuple):
    """The loss and what a user needs to judge it.

    Attributes:
        loss: scalar mean over the anchors.
        floored: scalar in [0, 1], share of anchors whose estimate sits on its floor and whose
            negatives therefore get no gradient.
    """

    loss: Tensor
    floored: Tensor


def debiased_terms(
    z1: Tensor, z2: Tensor, temperature: float = 0.5, tau_plus: float = 0.1
) -> DebiasedTerms:
    """The debiased loss together with the share of anchors on the floor.

    Arguments, errors and source as in :func:`debiased_loss_func`.
    """
    if not 0 <= tau_plus < 1:
        raise ValueError(f"tau_plus={tau_plus}: must lie in [0, 1)")
    positive, negatives, count = in_batch_logits(z1, z2, temperature)
    if count == 0:
        # The sum of no negatives is zero: log(exp(s+) / exp(s+)), still on the graph.
        return DebiasedTerms((positive - positive).mean(), positive.new_zeros(()))
    mass = negatives.logsumexp(dim=1)
    # All exponentials are taken relative to the larger of the two, so that none overflows and
    # the difference below loses nothing that the original form would keep.
    pivot = torch.maximum(mass, positive).detach()
    own = (positive - pivot).exp()
    estimate = ((mass - pivot).exp() - tau_plus * count * own) / (1 - tau_plus)
    floor = (math.log(count) - 1 / temperature - pivot).exp()
    total = own + torch.maximum(estimate, floor)
    loss = total.log() - (positive - pivot)
    return DebiasedTerms(loss.mean(), (estimate <= floor).to(loss.dtype).mean().detach())


@LOSSES.register(
    "debiased_loss_func",
    paper="Debiased Contrastive Learning",
    year=2020,
    arxiv="2007.00224",
)
def debiased_loss_func(
    z1: Tensor, z2: Tensor, temperature: float = 0.5, tau_plus: float = 0.1
) -> Tensor:
    """Contrastive loss whose negatives are corrected for those of the anchor's own class.

    ``-log(exp(s+) / (exp(s+) + N g))`` with
    ``g = max((mean_k exp(s_k) - tau_plus exp(s+)) / (1 - tau_plus), exp(-1 / temperature))``
    (Eq. 7 and 8, one positive), s the cosine over the temperature, k over the N = 2B - 2 other
    samples of both views; mean over the 2B anchors. ``tau_plus=0`` is NT-Xent.

    Args:
        z1: (B, D) first view; normalised inside.
        z2: (B, D) second view; normalised inside.
        temperature: above 0. The estimate was tuned for 0.5; at 0.2 and below most anchors of
            ``tau_plus=0.1`` sit on the floor.
        tau_plus: in [0, 1), the share of negatives that are of the anchor's class; 1 / number
            of classes where these are balanced.

    Returns:
        Scalar; zero that carries the graph for B = 1, where there is no negative.

    Raises:
        ValueError: shapes differ or are not (B, D), or a setting is out of range.

    Source:
        Chuang et al., NeurIPS 2020, arXiv 2007.00224.
    """
    return debiased_terms(z1, z2, temperature, tau_plus).loss
