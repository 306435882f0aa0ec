"""Assignments of samples to prototypes: softmax, or balanced over the batch by Sinkhorn-Knopp.

:func:`plain_sinkhorn` is the algorithm. :func:`assign` does not change the matrix of exponentials,
only one factor per row and per column, so that each iteration reads the matrix once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from solo_ext.core.distributed import max_over_ranks, sum_over_ranks
from solo_ext.kernels import dispatch
from solo_ext.kernels.dispatch import tile_rows, tiles_of


@torch.no_grad()
def plain_sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Sinkhorn-Knopp on the whole matrix (N, K), as in SwAV; the reference.

    Example:
        >>> rows = plain_sinkhorn(torch.randn(8, 4), epsilon=0.5, iterations=3).sum(1)
        >>> rows.allclose(torch.ones(8))
        True
    """
    assigned = torch.exp(scores / epsilon)
    for _ in range(iterations):
        assigned = assigned / assigned.sum(0, keepdim=True)  # prototypes get equal masses
        assigned = assigned / assigned.sum(1, keepdim=True)  # samples have mass 1
    return assigned


Logits = Callable[[slice, slice], Tensor]
"""Returns scores over epsilon for slices of samples and prototypes; they may be overwritten."""

SAFE_EXPONENT = 40.0
"""Exponentials of numbers up to +-40, and their sums over any K and N, are normal fp32 numbers."""

_SPAN = 3
"""Number of iterations for which scaling vectors stay in fp32's range, for any scores: an iteration
can change them by a factor of K or N, up to about 2^20."""


class Assignment(NamedTuple):
    """Probabilities ``P = diag(rows) matrix diag(columns)``, whose rows sum to 1.

    Attributes:
        matrix: (N, K) exponentials E, not negative.
        rows: (N,) factors of the samples.
        columns: (K,) factors of the prototypes.
        mean: (K,) mean of P over the samples of all ranks; sums to 1.

    Example:
        >>> scores = torch.randn(8, 4)
        >>> found = assign(lambda rows, columns: scores[rows, columns], (8, 4), scores, 3)
        >>> found.matrix.shape, found.rows.shape, found.columns.shape, found.mean.shape
        (torch.Size([8, 4]), torch.Size([8]), torch.Size([4]), torch.Size([4]))
    """

    matrix: Tensor
    rows: Tensor
    columns: Tensor
    mean: Tensor


@torch.no_grad()
def assign(
    logits: Logits,
    shape: tuple[int, int],
    like: Tensor,
    iterations: int,
    *,
    bound: float | None = None,
    storage: torch.dtype | None = None,
    products: bool = False,
) -> Assignment:
    """Softmax over the prototypes, or its balanced version by Sinkhorn-Knopp, as scaling vectors.

    An iteration first gives each prototype the same mass over the samples of all ranks, then each
    sample mass 1. Only the factors of the exponentials E change: ``columns = 1 / sum_i E_ik
    rows_i``, ``rows = 1 / sum_k E_ik columns_k``; one pass over E in blocks gives both sums.

    Args:
        logits: of this rank's samples, of any range.
        shape: (N, K), with N local samples; N may differ between ranks.
        like: tensor whose device and dtype, fp32 or fp64, are used.
        iterations: the same on every rank; 0 gives the softmax, with all prototype factors 1.
        bound: largest absolute value of any logit on any rank; ``None`` if unknown.
        storage: dtype of E; ``torch.bfloat16`` is accurate to 0.4% of each entry.
        products: whether ``logits`` computes matrix products, which are faster for many samples at
            a time, or only reads from memory.

    Example:
        >>> scores = torch.randn(8, 4)
        >>> found = assign(lambda rows, columns: scores[rows, columns] / 0.5, (8, 4), scores, 3)
        >>> (found.matrix * found.rows.unsqueeze(1) * found.columns).allclose(
        ...     plain_sinkhorn(scores, epsilon=0.5, iterations=3), atol=1e-5
        ... )
        True
    """
    matrix = like.new_empty(shape, dtype=storage or like.dtype)
    if bound is None or bound > SAFE_EXPONENT:
        columns = _shifted(logits, matrix, like, iterations, products)
    else:
        columns = _columns(matrix, _fill(logits, matrix, like, products), iterations)
    rows, masses = _sweep(matrix, columns)
    mean = masses * columns
    # Samples have mass 1, so the sum is the number of samples on all ranks.
    return Assignment(matrix, rows, columns, mean / mean.sum())


def _fill(logits: Logits, matrix: Tensor, like: Tensor, products: bool) -> Tensor:
    """Writes exponentials to ``matrix``; returns their sums (K,) over the samples of all ranks."""
    count, width = matrix.shape

    def fill(matrix: Tensor, tile: tuple[int, int]) -> Tensor:
        masses = like.new_zeros(width)
        for columns in tiles_of(width, tile[1]):
            for rows in tiles_of(count, tile[0]):
                block = matrix[rows, columns]
                torch.exp(logits(rows, columns), out=block)
                masses[columns] += block.sum(0, dtype=like.dtype)
        return masses

    everything = slice(None), slice(None)
    tile = (count, tile_rows(like, count, 64)) if products else (tile_rows(like, width, 4), width)
    forms: dict[dispatch.Form, Callable[[Tensor], Tensor]] = {
        "plain": lambda matrix: torch.exp(logits(*everything), out=matrix).sum(0, dtype=like.dtype),
        "tiles": partial(fill, tile=tile),
    }
    details = like.dtype, products
    return sum_over_ranks(dispatch.run("sinkhorn_scores", forms, [matrix], width, *details))


def _sweep(matrix: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the samples, and the prototypes' masses (K,) before their own factors."""

    def sweep(matrix: Tensor, columns: Tensor, tile: int) -> tuple[Tensor, Tensor]:
        rows, masses = columns.new_empty(matrix.shape[0]), torch.zeros_like(columns)
        for part in tiles_of(matrix.shape[0], tile):
            block = matrix[part].to(columns.dtype)
            rows[part] = own = (block @ columns).reciprocal_()
            masses.addmv_(block.T, own)
        return rows, masses

    def plain(matrix: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        matrix = matrix.to(columns.dtype)
        rows = (matrix @ columns).reciprocal_()
        return rows, matrix.T @ rows

    width = matrix.shape[1]
    forms: dict[dispatch.Form, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        "plain": plain,
        "tiles": partial(sweep, tile=tile_rows(columns, width, 4)),
    }
    # The sum over ranks is not part of a form, because each rank may choose another form.
    rows, masses = dispatch.run("sinkhorn_sums", forms, [matrix, columns], width)
    return rows, sum_over_ranks(masses)


def _columns(matrix: Tensor, masses: Tensor, iterations: int) -> Tensor:
    """Factors of the prototypes, from their masses over all ranks; 1 for 0 iterations."""
    if not iterations:
        return torch.ones_like(masses)
    columns = masses.reciprocal()
    for _ in range(iterations - 1):
        columns = _sweep(matrix, columns)[1].reciprocal_()
    return columns


def _shifted(
    logits: Logits, matrix: Tensor, like: Tensor, iterations: int, products: bool
) -> Tensor:
    """Writes exponentials of logits of any range to ``matrix``; returns the prototypes' factors.

    The largest logit of each prototype is subtracted, then the largest of each sample, so that
    every row and every column of E has a 1; the factors undo these shifts. After every ``_SPAN``
    iterations, the factors are moved into the exponents.
    """
    parts = list(tiles_of(len(matrix), tile_rows(like, matrix.shape[1], 64 if products else 4)))
    if not iterations:
        for part in parts:
            block = logits(part, slice(None))
            torch.exp(block.sub_(block.amax(1, keepdim=True)), out=matrix[part])
        return like.new_ones(matrix.shape[1])
    largest = like.new_full((matrix.shape[1],), float("-inf"))
    for part in parts:
        largest = torch.maximum(largest, logits(part, slice(None)).amax(0))
    shifts, rows = -max_over_ranks(largest), like.new_empty(len(matrix))
    columns = torch.empty_like(shifts)
    for begin in range(0, iterations, _SPAN):
        if begin:
            rows += _sweep(matrix, columns)[0].log()
            shifts += columns.log()
        masses = torch.zeros_like(shifts)
        for part in parts:
            block = logits(part, slice(None)).add_(shifts)
            weights = torch.ones_like(rows[part])
            if not begin:
                top = block.amax(1)
                rows[part] = -top
                # The first iteration's sums must not contain the shifts of the samples.
                weights = top.exp()
            torch.exp(block.add_(rows[part].unsqueeze(1)), out=matrix[part])
            masses.addmv_(matrix[part].to(shifts.dtype).T, weights)
        columns = _columns(matrix, sum_over_ranks(masses), min(_SPAN, iterations - begin))
    return columns
