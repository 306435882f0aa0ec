"""SEED: the teacher's similarities to a queue, taught to a student."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels.table_distillation import table_distillation
from solo_ext.losses.contrastive import shapes
from solo_ext.losses.registry import LOSSES


class SEEDTerms(NamedTuple):
    """The loss and what a user needs to judge it.

    Attributes:
        loss: scalar mean over the images.
        entropy: scalar, mean entropy of the teacher's targets in nats, which the loss cannot fall
            below; at most ln(K + 1).
        own: scalar in [0, 1], mean target of the image's own embedding; at 1 the loss is InfoNCE.
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
    """The SEED loss together with how soft its targets are.

    Arguments, errors and source as in :func:`seed_loss_func`.
    """
    shapes(student, teacher, queue)
    for name, value in (
        ("student_temperature", student_temperature),
        ("teacher_temperature", teacher_temperature),
    ):
        if value <= 0:
            raise ValueError(f"{name}={value}: must be above 0; the paper uses 0.2 and 0.01")
    with full_precision_products(student.device):
        student, teacher, queue = full_precision(student, teacher.detach(), queue.detach())
        terms = table_distillation(
            F.normalize(student, dim=1),
            F.normalize(teacher, dim=1),
            queue,
            (1 / student_temperature, 1 / teacher_temperature),
            compute_dtype=compute_dtype,
        )
        return SEEDTerms(*(x.mean() for x in terms))


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
    """Cross-entropy of the student's similarities with those of the teacher.

    ``-sum_j p_ij log softmax_j(s_i.d_j / T_s)``, ``p_i = softmax_j(t_i.d_j / T_t)``, mean over the
    images; d are the teacher's embedding of image i itself and the rows of the queue (section
    3.2). At a teacher temperature near 0 the target is the image's own embedding alone, and the
    loss is InfoNCE.

    Args:
        student: (N, D); normalised inside.
        teacher: (N, D) of the same images; normalised inside; a constant.
        queue: (K, D) unit rows, earlier embeddings of the teacher, used as they are; a constant.
            K may be 0.
        student_temperature: T_s, above 0.
        teacher_temperature: T_t, above 0.
        compute_dtype: of the factors of matrix products, but for the teacher's similarities,
            ``torch.bfloat16`` for example; fp32 by default.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes do not fit, or a temperature is not positive.

    Source:
        Fang et al., ICLR 2021, arXiv 2101.04731.
    """
    return seed_terms(
        student, teacher, queue, student_temperature, teacher_temperature, compute_dtype
    ).loss
