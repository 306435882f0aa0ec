"""Cross-entropy with assignments to learnable prototypes as targets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.dispatch import cut, once_differentiable, tile_rows, tiles_of
from solo_ext.kernels.sinkhorn import SAFE_EXPONENT, Assignment


def prototype_contrast(
    student: Tensor,
    prototypes: Tensor,
    assignments: Sequence[Assignment],
    weights: Tensor,
    prior: Tensor | None,
    inverse_temperature: float,
    *,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy of the student's similarities with given assignments.

    ``loss = sum_vu w_vu mean_i [-p_u[i].s_v[i] + log sum_k q_k exp(s_v[i, k])]``, ``s_v[i, k] =
    student_v[i].prototypes[k] / T``. A sample's loss depends on its own similarities only, so the
    tiled form computes the gradients to student and prototypes in the forward pass, block by block;
    the only whole (N, K) matrices are then the exponentials in the assignments.

    Args:
        student: (V, N, D) rows of length at most 1, fp32 or fp64.
        prototypes: (K, D) unit rows, of the student's dtype.
        assignments: (N, K) of each teacher view u; constants.
        weights: (V, U) w; at least 0, and sum to 1; constants.
        prior: (K,) q, above 0, in the student's dtype; all 1 by default; a constant.
        inverse_temperature: 1 / T.
        table: the prototypes in the dtype of the factors of matrix products, bf16 for example;
            sums and exponentials stay in the student's dtype.

    Returns:
        Scalars: the loss, and without gradient its two terms, ``-p.s`` and the log-sum-exp.

    Example:
        Cross-entropy of one student view with the softmax of a teacher's scores:

        >>> from solo_ext.kernels.sinkhorn import assign
        >>> student, prototypes, scores = torch.randn(1, 4, 8), torch.randn(9, 8), torch.randn(4, 9)
        >>> targets = assign(lambda rows, columns: scores[rows, columns] * 1, (4, 9), scores, 0)
        >>> one = torch.ones(1, 1)
        >>> loss, _, _ = prototype_contrast(student, prototypes, [targets], one, None, 2.0)
        >>> loss.allclose(torch.nn.functional.cross_entropy(
        ...     2.0 * student[0] @ prototypes.T, scores.softmax(1)
        ... ))
        True
    """
    table = prototypes.detach() if table is None else table
    count = student.shape[1]

    def plain(student: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Convert `prototypes` again rather than use `table`, which has no gradient.
        factors = (student * inverse_temperature).to(table.dtype)
        logits = (factors @ prototypes.to(table.dtype).T).to(student.dtype)
        with torch.no_grad():
            means = weights / count
            log_prior = 0 if prior is None else prior.log()
            targets = [a.matrix * a.columns for a in assignments]
        # One product of rows for each pair of views. For a single pair torch.einsum would call a
        # matrix product with one row, which took 1 ms for 512 x 65,536 on an H200.
        align = -sum(
            torch.linalg.vecdot(target, view) @ (a.rows * mean)
            for view, shares in zip(logits, means, strict=True)
            for target, a, mean in zip(targets, assignments, shares, strict=True)
        )
        unif = means.sum(1) @ (logits + log_prior).logsumexp(2).sum(1)
        return align + unif, align.detach(), unif.detach()

    def tiles(student: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = min(tile_rows(student, prototypes.shape[0], 64, share=32), count)
        tile = rows, tile_rows(student, 2 * rows, 64)
        if not torch.is_grad_enabled():
            student, prototypes = student.detach(), prototypes.detach()
        constants = tuple(assignments), weights, prior, table
        return _Contrast.apply(student, prototypes, constants, inverse_temperature, tile)  # type: ignore[no-any-return, no-untyped-call]

    forms: dict[dispatch.Form, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
        "plain": plain,
        "tiles": tiles,
    }
    details = len(assignments), prior is None, table.dtype
    return dispatch.run(
        "prototype_contrast", forms, [student, prototypes], len(prototypes), *details
    )


class _Contrast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        prototypes: Tensor,
        constants: tuple[tuple[Assignment, ...], Tensor, Tensor | None, Tensor],
        inverse_temperature: float,
        tiles: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        assignments, weights, prior, table = constants
        views, count, _ = student.shape
        to_student, to_prototypes = (
            torch.zeros_like(x) if needed else None
            for x, needed in zip((student, prototypes), ctx.needs_input_grad, strict=False)
        )
        align, unif = student.new_zeros(()), student.new_zeros(())
        safe = inverse_temperature <= SAFE_EXPONENT
        held = student.new_empty(min(tiles[0], count), len(table))
        parts = list(tiles_of(len(table), tiles[1]))
        for rows, view in itertools.product(tiles_of(count, len(held)), range(views)):
            exponentials = cut(held, slice(0, rows.stop - rows.start))
            factors = (cut(student[view], rows) * inverse_temperature).to(table.dtype)
            own = weights[view].sum() / count
            # For each teacher view: exponentials, factors of the prototypes, and factors of the
            # samples, which include the weight of a sample in the mean loss.
            targets = [
                (cut(a.matrix, rows), a.columns, cut(a.rows, rows) * (w / count))
                for a, w in zip(assignments, weights[view], strict=True)
            ]

            mass = student.new_zeros(len(exponentials))
            for part in parts:
                logits = (factors @ cut(table, part).T).to(student.dtype)
                for matrix, columns, share in targets:
                    align -= ((cut(matrix, part, 1) * logits) @ cut(columns, part)) @ share
                if safe:
                    torch.exp(logits, out=cut(exponentials, part, 1))
                    mass += _total(exponentials, prior, part)
                else:
                    exponentials[:, part] = logits
            largest = torch.zeros_like(mass)
            if not safe:
                largest = exponentials.amax(1)
                exponentials.sub_(largest.unsqueeze(1)).exp_()
                mass = _total(exponentials, prior, slice(None))
            unif += (mass.log() + largest).sum() * own
            if to_student is None and to_prototypes is None:
                continue

            # Turn the exponentials into the gradient to the similarities, in place.
            for part in parts:
                slopes = cut(exponentials, part, 1)
                if prior is not None:
                    slopes *= cut(prior, part)
                slopes *= (own / mass).unsqueeze(1)
                for matrix, columns, share in targets:
                    exact = cut(matrix, part, 1) * cut(columns, part)
                    slopes.addcmul_(exact, share.unsqueeze(1), value=-1)
                slopes = slopes.to(table.dtype)
                if to_student is not None:
                    cut(to_student[view], rows).add_(slopes @ cut(table, part))
                if to_prototypes is not None and factors.dtype == to_prototypes.dtype:
                    cut(to_prototypes, part).addmm_(slopes.T, factors)
                elif to_prototypes is not None:
                    cut(to_prototypes, part).add_(slopes.T @ factors)
        if to_student is not None:
            to_student *= inverse_temperature
        ctx.gradients = to_student, to_prototypes
        ctx.mark_non_differentiable(align, unif)
        return align + unif, align, unif

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        student, prototypes = (None if g is None else g * grad for g in ctx.gradients)
        return student, prototypes, None, None, None


def _total(exponentials: Tensor, prior: Tensor | None, part: slice) -> Tensor:
    block = cut(exponentials, part, 1)
    return block.sum(1) if prior is None else block @ cut(prior, part)
