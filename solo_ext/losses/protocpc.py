"""ProtoCPC: cross-entropy with prototype probabilities, corrected for how common each is."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.registry import LOSSES

LEAST_PRIOR = 1e-8
"""A prototype of prior 0 would never be pushed away from."""


@LOSSES.register(
    "protocpc_loss_func",
    paper="Representation Distillation by Prototypical Contrastive Predictive Coding",
    year=2021,
)
def protocpc_loss_func(
    student_logits: Tensor,
    teacher_probs: Tensor,
    prior: Tensor,
    temperature: float = 0.1,
) -> Tensor:
    """Cross-entropy of prototype probabilities, each prototype weighted by its prior.

    ``-sum_k p_ik s_ik + log sum_k q_k exp(s_ik)``, ``s = student_logits / T``, mean over the
    samples (Algorithm 1: alignment and uniformity). With q = 1 it is soft cross-entropy; the
    bound on mutual information is ``ln K`` minus the loss. For many prototypes
    :func:`solo_ext.losses.protocpc_step` computes it without the (N, K) matrices.

    Args:
        student_logits: (N, K) cosines of the student's features with the prototypes, not divided.
        teacher_probs: (N, K) rows that sum to 1; a constant.
        prior: (K,) that sums to K; below 1e-8 it counts as that; a constant.
        temperature: T, above 0.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes do not fit, or the temperature is not positive.

    Source:
        Lee, 2021, openreview 8la28hZOwug.
    """
    _check(student_logits, teacher_probs, prior, temperature)
    logits, probs, prior = full_precision(student_logits, teacher_probs, prior)
    with full_precision_products(logits.device):
        logits = logits / temperature
        weighted = logits + prior.detach().clamp(min=LEAST_PRIOR).log()
        align = -(probs.detach() * logits).sum(1)
        return (align + torch.logsumexp(weighted, dim=1)).mean()


def moved_prior(prior: Tensor, mean: Tensor, momentum: float) -> Tensor:
    """The prior after a batch, ``m q + (1 - m) K mean`` (Eq. 4).

    Args:
        prior: (K,) that sums to K.
        mean: (K,) mean of the teacher's probabilities, which sums to 1.
        momentum: m, in [0, 1].
    """
    return momentum * prior + (1 - momentum) * prior.shape[0] * mean.to(prior.dtype)


def _check(logits: Tensor, probs: Tensor, prior: Tensor, temperature: float) -> None:
    if logits.ndim != 2 or logits.shape != probs.shape:
        raise ValueError(
            f"student_logits and teacher_probs must both be (N, K), got {tuple(logits.shape)} and "
            f"{tuple(probs.shape)}"
        )
    if prior.shape != logits.shape[1:]:
        raise ValueError(
            f"prior must be ({logits.shape[1]},), one per prototype, got {tuple(prior.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: must be above 0; the paper uses 0.1")
