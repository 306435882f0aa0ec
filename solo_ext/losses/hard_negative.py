"""Contrastive loss with hard negative sampling."""

from __future__ import annotations

from torch import Tensor

from solo_ext.losses.debiased import estimated_loss
from solo_ext.losses.negative_mass import NegativeEstimator
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "hard_negative_loss_func",
    paper="Contrastive Learning with Hard Negative Samples",
    year=2021,
    arxiv="2010.04592",
)
def hard_negative_loss_func(
    z1: Tensor,
    z2: Tensor,
    temperature: float = 0.5,
    tau_plus: float = 0.1,
    beta: float = 1.0,
    detach_weights: bool = False,
    more_positives: Tensor | None = None,
) -> Tensor:
    """Debiased contrastive loss whose negatives weigh the more the more similar they are.

    ``-log(exp(s+) / (exp(s+) + N g))`` with
    ``g = max((R - tau_plus P) / (1 - tau_plus), exp(-1 / temperature))``,
    ``R = sum_k exp((1 + beta) s_k) / sum_k exp(beta s_k)`` (Eq. 4, importance sampling from
    ``exp(beta s)``) over the N = 2B - 2 other samples of both views, P likewise over the
    positives, s the cosine over the temperature; mean over the 2B anchors. ``beta=0`` is the
    debiased loss, ``beta=tau_plus=0`` NT-Xent.

    Args:
        z1: (B, D) first view; normalised inside.
        z2: (B, D) second view; normalised inside.
        temperature: above 0; beta multiplies similarities that are already divided by it.
        tau_plus: in [0, 1), the share of negatives that are of the anchor's class.
        beta: 0 or more, concentration on the hardest.
        detach_weights: no gradient through the weights ``exp(beta s)``; by default there is one,
            as in the official code. The value is the same.
        more_positives: (B, M - 1, D) as in :func:`debiased_loss_func`.

    Returns:
        Scalar; zero that carries the graph for B = 1, where there is no negative.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.

    Source:
        Robinson et al., ICLR 2021, arXiv 2010.04592.
    """
    estimator = NegativeEstimator(tau_plus, beta, detach_weights)
    return estimated_loss(z1, z2, temperature, estimator, more_positives)
