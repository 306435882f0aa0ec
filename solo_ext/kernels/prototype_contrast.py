"""Cross-entropy with assignments to prototypes that learn, in blocks of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solo_ext.kernels.sinkhorn import SAFE_EXPONENT, Assignment
from solo_ext.kernels.tables import tile_rows, tiles_of


class PrototypeContrast(NamedTuple):
    """Result of :func:`prototype_contrast`.

    Attributes:
        loss: scalar, ``align + unif``.
        align: scalar, ``-p.s``, without gradient.
        unif: scalar, the log-sum-exp, without gradient.
    """

    loss: Tensor
    align: Tensor
    unif: Tensor


def prototype_contrast(
    student: Tensor,
    prototypes: Tensor,
    assignments: Sequence[Assignment],
    weights: Tensor,
    prior: Tensor | None,
    inverse_temperature: float,
    *,
    table: Tensor | None = None,
    tiles: tuple[int, int] | None = None,
) -> PrototypeContrast:
    """Mean cross-entropy of the student's similarities with given assignments.

    ``loss = sum_vu w_vu mean_i [-p_u[i].s_v[i] + log sum_k q_k exp(s_v[i, k])]``, ``s_v[i, k] =
    student_v[i].prototypes[k] / T``. A sample's loss depends on its own similarities only, so the
    gradients to student and prototypes are computed in the forward pass, block by block. Of all
    (N, K) matrices only the assignments' exponentials are held whole.

    Args:
        student: (V, N, D) rows of length at most 1, fp32 or fp64.
        prototypes: (K, D) unit rows, of the student's dtype.
        assignments: (N, K) of each teacher view u; constants.
        weights: (V, U) w; at least 0, and sum to 1; constants.
        prior: (K,) q, above 0, in the student's dtype; all 1 by default; a constant.
        inverse_temperature: 1 / T.
        table: the prototypes in the dtype of the factors of matrix products, bf16 for example;
            sums and exponentials stay in the student's dtype.
        tiles: samples and prototypes per block; by default what suits the device.

    Raises:
        RuntimeError: it is differentiated twice.

    Example:
        Cross-entropy of one student view with the softmax of a teacher's scores:

        >>> from solo_ext.kernels.sinkhorn import assign
        >>> student, prototypes, scores = torch.randn(1, 4, 8), torch.randn(9, 8), torch.randn(4, 9)
        >>> targets = assign(lambda rows, columns: scores[rows, columns] * 1, (4, 9), scores, 0)
        >>> terms = prototype_contrast(student, prototypes, [targets], torch.ones(1, 1), None, 2.0)
        >>> terms.loss.allclose(torch.nn.functional.cross_entropy(
        ...     2.0 * student[0] @ prototypes.T, scores.softmax(1)
        ... ))
        True
    """
    if tiles is None:
        rows = min(tile_rows(student, prototypes.shape[0], 64, share=32), student.shape[1])
        tiles = rows, tile_rows(student, 2 * rows, 64)
    if not torch.is_grad_enabled():
        student, prototypes = student.detach(), prototypes.detach()
    table = prototypes.detach() if table is None else table
    constants = tuple(assignments), weights, prior, table
    return PrototypeContrast(
        *_Contrast.apply(student, prototypes, constants, inverse_temperature, tiles)  # type: ignore[no-untyped-call]
    )


_Constants = tuple[tuple[Assignment, ...], Tensor, Tensor | None, Tensor]


class _Contrast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        prototypes: Tensor,
        constants: _Constants,
        inverse_temperature: float,
        tiles: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        assignments, weights, prior, table = constants
        dtype = None if table.dtype == student.dtype else table.dtype
        views, count, _ = student.shape
        to_student, to_prototypes = (
            torch.zeros_like(x) if needed else None
            for x, needed in zip((student, prototypes), ctx.needs_input_grad[:2], strict=True)
        )
        align, unif = student.new_zeros(()), student.new_zeros(())
        height, width = min(tiles[0], count), table.shape[0]
        held = student.new_empty(height, width)
        for rows in tiles_of(count, height):
            exponentials = held[: rows.stop - rows.start]
            for view in range(views):
                scaled = student[view, rows] * inverse_temperature
                factors = scaled if dtype is None else scaled.to(dtype)
                # Row factors of each teacher view's probabilities in the mean loss of this view.
                shares = [
                    a.rows[rows] * (w / count)
                    for a, w in zip(assignments, weights[view], strict=True)
                ]
                own = weights[view].sum() / count
                block = _Block(exponentials, rows, shares, assignments, prior, tiles[1])
                lse = block.fill(factors, table, inverse_temperature)
                align -= block.agreement
                unif += lse.sum() * own
                if to_student is None and to_prototypes is None:
                    continue
                for part, coefficients in block.coefficients(own):
                    if dtype is not None:
                        coefficients = coefficients.to(dtype)
                    if to_student is not None:
                        to_student[view, rows] += coefficients @ table[part]
                    if to_prototypes is not None:
                        if dtype is None:
                            to_prototypes[part].addmm_(coefficients.T, factors)
                        else:
                            to_prototypes[part] += coefficients.T @ factors
        if to_student is not None:
            to_student *= inverse_temperature
        ctx.gradients = to_student, to_prototypes
        ctx.mark_non_differentiable(align, unif)
        return align + unif, align, unif

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        student, prototypes = (None if g is None else g * grad for g in ctx.gradients)
        return student, prototypes, None, None, None


class _Block:
    """Some samples of one student view against all prototypes."""

    def __init__(
        self,
        exponentials: Tensor,
        rows: slice,
        shares: list[Tensor],
        assignments: Sequence[Assignment],
        prior: Tensor | None,
        tile: int,
    ) -> None:
        self._exponentials = exponentials
        self._prior = prior
        self._parts = list(tiles_of(exponentials.shape[1], tile))
        self._targets = [
            (a.matrix[rows], a.columns, share.unsqueeze(1))
            for a, share in zip(assignments, shares, strict=True)
        ]
        self._mass = exponentials.new_zeros(len(exponentials))
        self.agreement = exponentials.new_zeros(())

    def fill(self, factors: Tensor, table: Tensor, bound: float) -> Tensor:
        """Computes the exponentials and ``agreement``; returns the log-sum-exps (n,)."""
        safe = bound <= SAFE_EXPONENT
        for part in self._parts:
            logits = (factors @ table[part].T).to(self._mass.dtype)
            for matrix, columns, share in self._targets:
                agreed = (matrix[:, part] * logits) @ columns[part]
                self.agreement += agreed @ share.squeeze(1)
            if safe:
                torch.exp(logits, out=self._exponentials[:, part])
                self._weigh(part)
            else:
                self._exponentials[:, part] = logits
        if safe:
            return self._mass.log()
        largest = self._exponentials.amax(1)
        self._exponentials.sub_(largest.unsqueeze(1)).exp_()
        self._weigh(slice(None))
        return self._mass.log() + largest

    def _weigh(self, part: slice) -> None:
        exponentials = self._exponentials[:, part]
        if self._prior is None:
            self._mass += exponentials.sum(1)
        else:
            self._mass += exponentials @ self._prior[part]

    def coefficients(self, own: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields tiles of the (n, K) gradient to the similarities; overwrites the exponentials."""
        factors = (own / self._mass).unsqueeze(1)
        for part in self._parts:
            tile = self._exponentials[:, part]
            if self._prior is not None:
                tile *= self._prior[part]
            tile *= factors
            for matrix, columns, share in self._targets:
                tile.addcmul_(matrix[:, part] * columns[part], share, value=-1)
            yield part, tile
