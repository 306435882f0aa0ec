"""SEED: distils a teacher's similarities to a queue into a student."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision_products
from solo_ext.kernels.tables import table_logsumexp, table_mean
from solo_ext.losses.common import LOSSES, check_positive, check_table, unit_rows


def plain_seed(
    student: Tensor,
    teacher: Tensor,
    queue: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """The cross-entropy of section 3.2 for unit rows, on (N, 1 + K) matrices; the reference.

    Example:
        >>> student, teacher, queue = (F.normalize(torch.randn(n, 8)) for n in (4, 4, 100))
        >>> plain_seed(student, teacher, queue, 0.2, 0.01).shape
        torch.Size([])
    """
    own = (student * teacher).sum(1, keepdim=True), (teacher * teacher).sum(1, keepdim=True)
    predicted = torch.cat((own[0], student @ queue.T), dim=1) / student_temperature
    targets = (torch.cat((own[1], teacher @ queue.T), dim=1) / teacher_temperature).softmax(1)
    return F.cross_entropy(predicted, targets)


class SEEDTerms(NamedTuple):
    """The loss and the values that show how it behaves.

    Attributes:
        loss: scalar mean over the images.
        entropy: scalar, mean entropy of the teacher's targets in nats, which the loss cannot fall
            below; at most ln(K + 1).
        own: scalar in [0, 1], mean target probability of the image's own embedding; at 1 the loss
            is InfoNCE.

    Example:
        >>> terms = seed_terms(torch.eye(4, 8), torch.eye(4, 8), torch.randn(100, 8))
        >>> terms.loss.shape, terms.entropy.shape, terms.own.shape
        (torch.Size([]), torch.Size([]), torch.Size([]))
    """

    loss: Tensor
    entropy: Tensor
    own: Tensor


def seed_terms(
    student: Tensor,
    teacher: Tensor,
    queue: Tensor,
    student_temperature: float = 0.2,
    teacher_temperature: float = 0.01,
    compute_dtype: torch.dtype | None = None,
) -> SEEDTerms:
    """The SEED loss, and measures of how soft the targets are.

    The targets p are needed only in the mean ``m_i = sum_j p_ij d_j``:
    ``loss_i = log sum_j exp(s_i.d_j / T_s) - s_i.m_i / T_s``. Arguments and errors are those of
    :func:`seed_loss_func`.

    Example:
        Without a queue the only target is the image's own embedding:

        >>> terms = seed_terms(torch.randn(4, 8), torch.randn(4, 8), torch.empty(0, 8))
        >>> terms.own, terms.entropy
        (tensor(1.), tensor(0.))
    """
    student, teacher = unit_rows(student=student, teacher=teacher.detach())
    check_table("queue", queue, student)
    check_positive(student_temperature=student_temperature, teacher_temperature=teacher_temperature)
    queue = queue.to(student.dtype)
    sharpness, scale = 1 / teacher_temperature, 1 / student_temperature
    with full_precision_products(student.device):
        of_queue, mean = table_mean(teacher, queue, sharpness)
        predicted, _ = table_logsumexp(
            student, queue, scale, unit=True, compute_dtype=compute_dtype
        )
        # Subtract the logit of the image's own entry d_0 = t from all logits: low temperatures
        # make the logits large, but their differences stay small.
        from_queue = of_queue - sharpness * (teacher * teacher).sum(1)
        pull = from_queue.sigmoid().unsqueeze(1) * (mean - teacher)  # m - t
        mass = predicted[0] - scale * (student * teacher).sum(1)
        loss = -F.logsigmoid(-mass) - scale * (student * pull).sum(1)
        entropy = -F.logsigmoid(-from_queue) - sharpness * (teacher * pull).sum(1)
        return SEEDTerms(loss.mean(), entropy.mean(), (-from_queue).sigmoid().mean())


@LOSSES.register(
    "seed_loss_func",
    paper="SEED: Self-supervised Distillation For Visual Representation",
    year=2021,
    arxiv="2101.04731",
)
def seed_loss_func(
    student: Tensor,
    teacher: Tensor,
    queue: Tensor,
    student_temperature: float = 0.2,
    teacher_temperature: float = 0.01,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross-entropy of the student's similarities with the teacher's similarities as targets.

    ``-sum_j p_ij log softmax_j(s_i.d_j / T_s)``, ``p_i = softmax_j(t_i.d_j / T_t)``, mean over the
    images; d are the teacher's embedding of image i itself and the rows of the queue (section 3.2
    of Fang et al., ICLR 2021). At a teacher temperature near 0 the target is the image's own
    embedding alone, and the loss is InfoNCE.

    Args:
        student: (N, D); normalised inside.
        teacher: (N, D) of the same images; normalised inside; a constant.
        queue: (K, D) unit rows, earlier embeddings of the teacher, not normalised again; a
            constant. K may be 0.
        student_temperature: T_s, above 0.
        teacher_temperature: T_t, above 0.
        compute_dtype: dtype of the factors in the student's matrix products, ``torch.bfloat16``
            for example; fp32 by default. The teacher's products keep full precision, because its
            low temperature magnifies errors.

    Example:
        >>> student, teacher, queue = (F.normalize(torch.randn(n, 8)) for n in (4, 4, 100))
        >>> seed_loss_func(student, teacher, queue).allclose(
        ...     plain_seed(student, teacher, queue, 0.2, 0.01), rtol=1e-4
        ... )
        True
    """
    return seed_terms(
        student, teacher, queue, student_temperature, teacher_temperature, compute_dtype
    ).loss
