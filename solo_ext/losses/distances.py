"""Euclidean distances whose gradient is finite everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solo_ext.core.precision import full_precision_products


def row_distances(x: Tensor, y: Tensor) -> Tensor:
    """(N,) distances of row i of ``x`` to row i of ``y``, both (N, D); gradient 0 at distance 0."""
    distances: Tensor = torch.linalg.vector_norm(x - y, dim=1)
    return distances


def pairwise_distances(x: Tensor, y: Tensor) -> Tensor:
    """Distances of every row of ``x`` to every row of ``y``.

    Differences are taken before they are squared, so that close rows keep their distance; equal
    rows have distance 0 and gradient 0. The backward pass needs no more than (N, M) either.

    Args:
        x: (N, D), fp32 or fp64.
        y: (M, D), of the dtype of ``x``.

    Returns:
        (N, M).

    Raises:
        RuntimeError: it is differentiated twice.
    """
    return _PairwiseDistances.apply(x, y)  # type: ignore[no-any-return, no-untyped-call]


class _PairwiseDistances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
        ctx.save_for_backward(x, y, distances)
        return distances

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y, distances = ctx.saved_tensors
        weights = torch.where(distances > 0, grad / distances, 0.0)
        # Distances do not change under a shift, and rows that have collapsed to one place lose
        # their digits in the products below unless that place is the origin.
        centre = y.mean(0)
        x, y = x - centre, y - centre
        of_x = of_y = None
        with full_precision_products(grad.device):
            if ctx.needs_input_grad[0]:
                of_x = weights.sum(1, keepdim=True) * x - weights @ y
            if ctx.needs_input_grad[1]:
                of_y = weights.sum(0).unsqueeze(1) * y - weights.T @ x
        return of_x, of_y
