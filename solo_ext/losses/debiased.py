"""Debiased contrastive loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.batch_of_views import batch_of_views
from solo_ext.losses.core import ContrastiveTerms, contrastive
from solo_ext.losses.negative_mass import NegativeEstimator
from solo_ext.losses.registry import LOSSES
from solo_ext.losses.two_views import two_view_loss, two_view_terms


def estimated_terms(
    z1: Tensor,
    z2: Tensor,
    temperature: float,
    estimator: NegativeEstimator,
    more_positives: Tensor | None = None,
) -> ContrastiveTerms:
    """Two views against each other and the batch, by an estimate of the negatives' mass.

    Args:
        z1: (N, D) first view; normalised inside.
        z2: (N, D) second view; normalised inside.
        temperature: above 0.
        estimator: of the mass.
        more_positives: (N, M - 1, D) further views of the images, which only make the estimate
            better; normalised inside.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.
    """
    if more_positives is None:
        return two_view_terms(z1, z2, temperature, estimator)
    batch = batch_of_views((z1, z2))
    if more_positives.ndim != 3 or more_positives.shape[::2] != z1.shape:
        raise ValueError(
            f"more_positives must be ({z1.shape[0]}, M - 1, {z1.shape[1]}), got "
            f"{tuple(more_positives.shape)}"
        )
    with full_precision_products(z1.device):
        extra = F.normalize(full_precision(more_positives)[0].to(batch.anchors), dim=2)
    return contrastive(
        **batch._asdict(),
        estimator=estimator,
        temperature=temperature,
        extra_positives=extra.repeat(2, 1, 1),
    )


def estimated_loss(
    z1: Tensor,
    z2: Tensor,
    temperature: float,
    estimator: NegativeEstimator,
    more_positives: Tensor | None = None,
) -> Tensor:
    """The loss of :func:`estimated_terms` alone."""
    if more_positives is None:
        return two_view_loss(z1, z2, temperature, estimator)
    return estimated_terms(z1, z2, temperature, estimator, more_positives).loss


@LOSSES.register(
    "debiased_loss_func",
    paper="Debiased Contrastive Learning",
    year=2020,
    arxiv="2007.00224",
)
def debiased_loss_func(
    z1: Tensor,
    z2: Tensor,
    temperature: float = 0.5,
    tau_plus: float = 0.1,
    more_positives: Tensor | None = None,
) -> Tensor:
    """Contrastive loss whose negatives are corrected for those of the anchor's own class.

    ``-log(exp(s+) / (exp(s+) + N g))`` with
    ``g = max((mean_k exp(s_k) - tau_plus mean_m exp(s_m)) / (1 - tau_plus), exp(-1 / T))``
    (Eq. 7 and 8), s the cosine over the temperature T, k over the N = 2B - 2 other samples of both
    views, m over the M positives; mean over the 2B anchors. ``tau_plus=0`` is NT-Xent.

    Args:
        z1: (B, D) first view; normalised inside.
        z2: (B, D) second view; normalised inside.
        temperature: above 0. The estimate was tuned for 0.5; at 0.2 and below most anchors of
            ``tau_plus=0.1`` sit on the floor.
        tau_plus: in [0, 1), the share of negatives that are of the anchor's class; 1 / number
            of classes where these are balanced.
        more_positives: (B, M - 1, D) further views of the images, of which the estimate takes
            the mean together with the positive; normalised inside. ``None`` is M = 1.

    Returns:
        Scalar; zero that carries the graph for B = 1, where there is no negative.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.

    Source:
        Chuang et al., NeurIPS 2020, arXiv 2007.00224.
    """
    return estimated_loss(z1, z2, temperature, NegativeEstimator(tau_plus), more_positives)
