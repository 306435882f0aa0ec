"""The step of a method that compares assignments to prototypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor

from solo_ext.losses.protocpc import protocpc_step
from solo_ext.memory.prior import PrototypePrior
from solo_ext.memory.prototypes import Prototypes


class Prototypical(Protocol):
    """A method with prototypes, and a prior over them that is one step behind until committed."""

    cfg: DictConfig
    prototypes: Prototypes
    prior: PrototypePrior
    _next_prior: Tensor | None


def compare_assignments(
    method: Prototypical,
    students: Sequence[Tensor],
    teachers: Sequence[Tensor],
    targets: Tensor | None = None,
    teacher_prototypes: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """ProtoCPC of the students' views with the teachers', or cross-entropy, as the config says.

    Args:
        method: whose prior is left as it is; :func:`commit` moves it on.
        students: (N, D) embeddings, one per view.
        teachers: (N, D) embeddings, one per view that is a target.
        targets: (V, U) weights, which teacher view is a target of which student view; all by
            default.
        teacher_prototypes: (K, D) unit rows; those of the students by default.

    Returns:
        Scalar, and what to log: ``train_align`` and ``train_unif``, the two terms of the loss, and
        ``train_prior_perplexity``, the share of the prototypes that the prior spreads over.
    """
    kwargs = method.cfg.method_kwargs
    terms = protocpc_step(
        torch.stack(list(students)),
        torch.stack(list(teachers)),
        method.prototypes.weight,
        method.prior.value,
        teacher_prototypes=teacher_prototypes,
        targets=targets,
        student_temperature=kwargs.student_temperature,
        teacher_temperature=kwargs.teacher_temperature,
        assignment=kwargs.assignment,
        iterations=kwargs.sinkhorn_iterations,
        prior_momentum=kwargs.prior_momentum,
        prior_order=kwargs.prior_order,
        loss=kwargs.loss,
        compute_dtype=torch.bfloat16 if kwargs.compute_dtype == "bfloat16" else None,
    )
    method._next_prior = terms.prior
    share = terms.prior / len(terms.prior)
    perplexity = torch.special.entr(share).sum().exp() / len(share)
    return terms.loss, {
        "train_align": terms.align,
        "train_unif": terms.unif,
        "train_prior_perplexity": perplexity,
    }


def commit(method: Prototypical) -> None:
    """After the optimiser's step: unit prototypes, and the prior that contains the batch."""
    method.prototypes.normalize_()
    if method._next_prior is not None:
        method.prior.commit_(method._next_prior)
        method._next_prior = None
