"""Cross-entropy between two softmaxes over the same large table."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from solo_ext.kernels.table_logsumexp import RunningSum, product
from solo_ext.kernels.tiles import tile_rows


class TableDistillation(NamedTuple):
    """What :func:`table_distillation` gives, of each row.

    Attributes:
        loss: (N,) cross-entropy.
        entropy: (N,) of the targets, in nats, without gradient.
        own: (N,) target of the row's own entry, without gradient.
    """

    loss: Tensor
    entropy: Tensor
    own: Tensor


def table_distillation(
    student: Tensor,
    teacher: Tensor,
    table: Tensor,
    inverse_temperatures: tuple[float, float],
    tile: int | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
) -> TableDistillation:
    """Cross-entropy of similarities to a table and to the row's own teacher embedding.

    ``loss_i = log sum_j exp(s_i.t_ij / T) - s_i.m_i / T``, ``m_i = sum_j p_ij t_ij``, p the
    softmax of ``teacher_i.t_ij`` over the teacher's temperature; t_i0 is ``teacher_i``, t_ij the
    table's row j. Only the mean row m is needed of the targets: the table is read once, tile by
    tile, and memory does not grow with K. The student's gradient is made along the way.

    Args:
        student: (N, D), fp32 or fp64; the only input that gets a gradient.
        teacher: (N, D), of the student's dtype.
        table: (K, D), likewise; K may be 0.
        inverse_temperatures: of student and teacher.
        tile: rows of the table at a time; by default what suits the device's cache.
        compute_dtype: of the factors of the student's matrix products and of those with the
            targets, ``torch.bfloat16`` for example. The teacher's similarities keep full
            precision, for its temperature magnifies their errors.

    Raises:
        RuntimeError: it is differentiated twice.
    """
    if tile is None:
        tile = tile_rows(student, 2 * student.shape[0], 64)
    student = student if torch.is_grad_enabled() else student.detach()
    settings = inverse_temperatures, tile, compute_dtype
    return TableDistillation(*_Distillation.apply(student, teacher, table, *settings))  # type: ignore[no-untyped-call]


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        table: Tensor,
        inverse_temperatures: tuple[float, float],
        tile: int,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        scaled, sharp = (
            x * t for x, t in zip((student, teacher), inverse_temperatures, strict=True)
        )
        of_student, of_teacher = RunningSum(student, wanted), RunningSum(teacher, True)
        for begin in range(0, table.shape[0], tile):
            rows = table[begin : begin + tile]
            of_student.absorb(product(scaled, rows.T, dtype), rows, dtype)
            of_teacher.absorb(product(sharp, rows.T, None), rows, dtype)
        predicted = _Joined(of_student, (scaled * teacher).sum(1), teacher)
        targets = _Joined(of_teacher, (sharp * teacher).sum(1), teacher)
        assert targets.mean is not None
        ctx.gradient = None
        if predicted.mean is not None:
            ctx.gradient = (predicted.mean - targets.mean) * inverse_temperatures[0]
        loss = predicted.lse - (scaled * targets.mean).sum(1)
        entropy = targets.lse - (sharp * targets.mean).sum(1)
        own = (-targets.lse).exp()
        ctx.mark_non_differentiable(entropy, own)
        return loss, entropy, own

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient = None if ctx.gradient is None else ctx.gradient * grad.unsqueeze(1)
        return gradient, None, None, None, None, None


class _Joined:
    """Sums over a table and one row more, relative to that row.

    Low temperatures make all logits large and their differences small.

    Attributes:
        lse: (N,) log-sum-exp less the logit of the row.
        mean: (N, D) weighted mean less the row, where the sums hold one.
    """

    def __init__(self, held: RunningSum, logit: Tensor, row: Tensor) -> None:
        rest = held.value() - logit
        self.lse = -F.logsigmoid(-rest)
        self.mean: Tensor | None = None
        if held.mean is not None:
            # The sums are relative to their largest entry, minus infinity for an empty table.
            share = (held.largest - logit - self.lse).exp()
            self.mean = held.mean * share.unsqueeze(1) - row * rest.sigmoid().unsqueeze(1)
