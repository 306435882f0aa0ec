"""ProtoCPC: cross-entropy of prototype probabilities, with a prior for the prototypes."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels.dispatch import cut
from solo_ext.kernels.normalized import normalized
from solo_ext.kernels.prototype_contrast import prototype_contrast
from solo_ext.kernels.sinkhorn import Assignment, assign, plain_sinkhorn
from solo_ext.losses.common import LOSSES, check_positive, check_table

AssignmentKind = Literal["sinkhorn", "softmax"]
PriorOrder = Literal["before_loss", "after_loss"]
PrototypeLoss = Literal["protocpc", "ce"]

LEAST_PRIOR = 1e-8
"""Lower bound of the prior: at a prior of 0, the loss would not push away from the prototype."""


def plain_protocpc(
    student: Tensor,
    teacher: Tensor,
    prototypes: Tensor,
    prior: Tensor,
    student_temperature: float = 0.1,
    teacher_temperature: float = 0.04,
    prior_momentum: float = 0.9,
) -> Tensor:
    """Algorithm 1 for unit rows of one view each, with whole (N, K) matrices; the reference.

    Example:
        >>> student, teacher, prototypes = (F.normalize(torch.randn(n, 8)) for n in (4, 4, 20))
        >>> plain_protocpc(student, teacher, prototypes, prior=torch.ones(20)).shape
        torch.Size([])
    """
    with torch.no_grad():
        probs = plain_sinkhorn(teacher @ prototypes.T, teacher_temperature, iterations=3)
        prior = updated_prior(prior, probs.mean(0), prior_momentum)
    return protocpc_loss_func(student @ prototypes.T, probs, prior, student_temperature)


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
    samples (Algorithm 1 of Lee, 2021, openreview 8la28hZOwug: alignment and uniformity). With q = 1
    it is soft cross-entropy; the bound on mutual information is ``ln K`` minus the loss. For many
    prototypes, :func:`solo_ext.losses.protocpc_step` computes it in tiles.

    Args:
        student_logits: (N, K) cosines of the student's features with the prototypes, not yet
            divided by the temperature.
        teacher_probs: (N, K) rows that sum to 1; a constant.
        prior: (K,) q, which sums to K; values below 1e-8 are raised to 1e-8; a constant.
        temperature: T, above 0.

    Example:
        >>> logits, probs = torch.rand(4, 10), torch.rand(4, 10).softmax(1)
        >>> loss = protocpc_loss_func(logits, probs, torch.ones(10), temperature=0.1)
        >>> loss.allclose(F.cross_entropy(logits / 0.1, probs))
        True
    """
    shape, of_probs = tuple(student_logits.shape), tuple(teacher_probs.shape)
    if len(shape) != 2 or shape != of_probs:
        raise ValueError(
            f"student_logits and teacher_probs must both be (N, K), got {shape} and {of_probs}"
        )
    if tuple(prior.shape) != shape[1:]:
        raise ValueError(
            f"prior must be ({shape[1]},), one per prototype, got {tuple(prior.shape)}"
        )
    check_positive(temperature=temperature)
    logits, probs, prior = full_precision(student_logits, teacher_probs, prior)
    with full_precision_products(logits.device):
        logits = logits / temperature
        weighted = logits + prior.detach().clamp(min=LEAST_PRIOR).log()
        align = -(probs.detach() * logits).sum(1)
        return (align + torch.logsumexp(weighted, dim=1)).mean()


def updated_prior(prior: Tensor, mean: Tensor, momentum: float) -> Tensor:
    """The prior after a batch, ``m q + (1 - m) K mean`` (Eq. 4).

    Args:
        prior: (K,) that sums to K.
        mean: (K,) mean of the teacher's probabilities, which sums to 1.
        momentum: m, in [0, 1].

    Example:
        >>> updated_prior(torch.ones(4), torch.tensor([1.0, 0.0, 0.0, 0.0]), momentum=0.9)
        tensor([1.3000, 0.9000, 0.9000, 0.9000])
    """
    return momentum * prior + (1 - momentum) * prior.shape[0] * mean.to(prior.dtype)


class ProtoCPCTerms(NamedTuple):
    """Result of :func:`protocpc_step`.

    Attributes:
        loss: scalar, ``align + unif``.
        align: scalar, ``-p.s``, without gradient.
        unif: scalar, the log-sum-exp, without gradient.
        prior: (K,) updated by this batch, to be stored after the step; the same on every rank.

    Example:
        >>> z, prototypes = torch.randn(1, 4, 8), F.normalize(torch.randn(20, 8))
        >>> terms = protocpc_step(z, z, prototypes, torch.ones(20))
        >>> terms.loss.allclose(terms.align + terms.unif), terms.prior.shape
        (True, torch.Size([20]))
    """

    loss: Tensor
    align: Tensor
    unif: Tensor
    prior: Tensor


def protocpc_step(
    student: Tensor,
    teacher: Tensor,
    prototypes: Tensor,
    prior: Tensor,
    *,
    teacher_prototypes: Tensor | None = None,
    targets: Tensor | None = None,
    student_temperature: float = 0.1,
    teacher_temperature: float = 0.04,
    assignment: AssignmentKind = "sinkhorn",
    iterations: int = 3,
    prior_momentum: float = 0.9,
    prior_order: PriorOrder = "before_loss",
    loss: PrototypeLoss = "protocpc",
    compute_dtype: torch.dtype | None = None,
) -> ProtoCPCTerms:
    """ProtoCPC loss of student views against assignments of teacher views, from the features.

    ``loss = sum_vu w_vu mean_i [-p_u[i].s_v[i] + log sum_k q_k exp(s_v[i, k])] / sum_vu w_vu``
    (Algorithm 1 of Lee, 2021, openreview 8la28hZOwug). ``s_v[i, k]`` are the cosines of the
    student's features with the prototypes over the student's temperature. p_u is the softmax of the
    teacher's cosines over the teacher's temperature, or Sinkhorn's assignment, which balances each
    teacher view over the batch of all ranks; q is the prior. The mean is over the local samples. If
    the (N, K) matrices are large, only the teacher's exponentials are held whole.

    Args:
        student: (V, N, D) views; normalised inside.
        teacher: (U, N, Dt) views whose assignments are targets; normalised inside; a constant.
        prototypes: (K, D) unit rows, learnable or not.
        prior: (K,) that sums to K, as it was before this step; a constant.
        teacher_prototypes: (K, Dt) unit rows, a constant; by default the student's prototypes.
        targets: (V, U) weights w of each teacher view as a target of each student view, at least 0
            and not all 0; all 1 by default.
        student_temperature: above 0.
        teacher_temperature: above 0; Sinkhorn's epsilon.
        assignment: ``sinkhorn``: balanced over the batch, see :func:`solo_ext.memory.sinkhorn`;
            ``softmax``.
        iterations: of Sinkhorn, 1 or more.
        prior_momentum: in [0, 1].
        prior_order: when the prior is updated. ``before_loss``: q contains this batch, as in the
            paper; ``after_loss``: q is the prior as given.
        loss: ``protocpc``, or ``ce``: soft cross-entropy, with all q = 1. Both update the prior.
        compute_dtype: dtype of the factors of matrix products and of the teacher's exponentials,
            ``torch.bfloat16`` for example; fp32 by default.

    Returns:
        Loss, its two terms, and the prior updated by this batch.

    Example:
        >>> student, teacher, prototypes = (
        ...     F.normalize(torch.randn(n, 8), dim=-1) for n in (4, 4, 20)
        ... )
        >>> terms = protocpc_step(student[None], teacher[None], prototypes, torch.ones(20))
        >>> terms.loss.allclose(plain_protocpc(student, teacher, prototypes, torch.ones(20)))
        True
    """
    held = prototypes if teacher_prototypes is None else teacher_prototypes
    _check_shapes(student, teacher, prototypes, held, prior, targets)
    check_positive(student_temperature=student_temperature, teacher_temperature=teacher_temperature)
    if iterations < 1:
        raise ValueError(f"iterations={iterations}: must be 1 or more; the paper uses 3")
    if not 0 <= prior_momentum <= 1:
        raise ValueError(f"prior_momentum={prior_momentum}: must be in [0, 1]; the paper uses 0.9")
    for name, value, kinds in (
        ("assignment", assignment, AssignmentKind),
        ("prior_order", prior_order, PriorOrder),
        ("loss", loss, PrototypeLoss),
    ):
        if value not in get_args(kinds):
            raise ValueError(
                f"{name}={value!r}: must be one of {', '.join(map(repr, get_args(kinds)))}"
            )
    with full_precision_products(student.device):
        student, prototypes = full_precision(student, prototypes)
        student = normalized(student)
        with torch.no_grad():
            teacher, held, prior = (x.to(student.dtype) for x in (teacher, held, prior))
            table = prototypes.detach().to(compute_dtype or student.dtype)
            teacher_table = table if teacher_prototypes is None else held.to(table.dtype)
            # p_t = Sinkhorn or softmax of z_t . W / tau_t
            steps = iterations if assignment == "sinkhorn" else 0
            found = [_assigned(view, teacher_table, teacher_temperature, steps) for view in teacher]
            # q <- m q + (1 - m) K mean(p_t) (Eq. 4)
            mean = torch.stack([a.mean for a in found]).mean(0)
            moved = updated_prior(prior, mean, prior_momentum)
            used = moved if prior_order == "before_loss" else prior
            if targets is None:
                targets = student.new_ones(student.shape[0], teacher.shape[0])
            weights = targets.to(student.dtype)
            weights = weights / weights.sum()
        # -p_t . (z_s . W / tau_s) + log sum_k q_k exp(z_s . W_k / tau_s)
        q = used.clamp(min=LEAST_PRIOR) if loss == "protocpc" else None
        terms = prototype_contrast(
            student, prototypes, found, weights, q, 1 / student_temperature, table=table
        )
        return ProtoCPCTerms(*terms, moved)


def _assigned(teacher: Tensor, table: Tensor, temperature: float, iterations: int) -> Assignment:
    """Assignment (N, K) of one view; 0 iterations give the softmax."""
    scale = 1 / temperature
    factors = (F.normalize(teacher, dim=-1) * scale).to(table.dtype)

    def logits(rows: slice, columns: slice) -> Tensor:
        return (cut(factors, rows) @ cut(table, columns).T).to(teacher.dtype)

    shape = len(teacher), len(table)
    return assign(
        logits, shape, teacher, iterations, bound=scale, storage=table.dtype, products=True
    )


def _check_shapes(
    student: Tensor,
    teacher: Tensor,
    prototypes: Tensor,
    teacher_prototypes: Tensor,
    prior: Tensor,
    targets: Tensor | None,
) -> None:
    shapes = f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)}"
    if student.ndim != 3 or teacher.ndim != 3 or student.shape[1] != teacher.shape[1]:
        raise ValueError(f"student must be (V, N, D) and teacher (U, N, Dt), got {shapes}")
    if not student.shape[:2].numel() or not teacher.shape[0]:
        raise ValueError(f"there must be a view and a sample at least, got {shapes}")
    check_table("prototypes", prototypes, student)
    check_table("teacher_prototypes", teacher_prototypes, teacher)
    if not len(prototypes) == len(teacher_prototypes) == len(prior) or prior.ndim != 1:
        sizes = f"{len(prototypes)}, {len(teacher_prototypes)} and {tuple(prior.shape)}"
        raise ValueError(f"prototypes, teacher_prototypes and prior must be of one K, got {sizes}")
    views = student.shape[0], teacher.shape[0]
    if targets is not None and targets.shape != views:
        raise ValueError(
            f"targets must be {views}, student by teacher views, got {tuple(targets.shape)}"
        )
