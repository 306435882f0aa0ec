"""Log-sum-exp of similarities to a large constant table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE_BYTES = {"cpu": 2**20, "cuda": 2**25}


def table_logsumexp(
    query: Tensor, table: Tensor, scale: Tensor, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the rows of a table, without the matrix of similarities.

    ``lse_i = log sum_j exp(scale_j q_i . t_j)``. The table is read once, tile by tile; the
    gradient ``sum_j softmax_ij scale_j t_j`` is made along the way, so that memory does not grow
    with K and nothing of the table is kept for the backward pass: it may be overwritten before.

    Args:
        query: (N, D), fp32 or fp64; the only input that gets a gradient.
        table: (K, D), of the query's dtype.
        scale: (K,) or scalar, inverse temperatures.
        tile: rows of the table at a time; by default what suits the device's cache.

    Returns:
        ``lse`` (N,), minus infinity for K = 0, and the largest ``scale_j q_i . t_j`` (N,), without
        gradient.

    Raises:
        RuntimeError: it is differentiated twice.
    """
    if tile is None:
        budget = _TILE_BYTES.get(query.device.type, _TILE_BYTES["cuda"])
        tile = max(budget // (query.element_size() * max(query.shape[0], 1)), 64)
    return _TableLogSumExp.apply(query, table, scale, tile)  # type: ignore[no-any-return, no-untyped-call]


class _TableLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, table: Tensor, scale: Tensor, tile: int
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        shared = scale.ndim == 0
        scaled = query * scale if shared else query
        largest = query.new_full(query.shape[:1], float("-inf"))
        total, mean = torch.zeros_like(largest), torch.zeros_like(query)
        for begin in range(0, table.shape[0], tile):
            rows = table[begin : begin + tile]
            logits = scaled @ rows.T
            if not shared:
                logits *= scale[begin : begin + tile]
            grown = torch.maximum(largest, logits.amax(1)) if begin else logits.amax(1)
            weights = logits.sub_(grown.unsqueeze(1)).exp_()
            decay = (largest - grown).exp_() if begin else None
            total = weights.sum(1) if decay is None else total * decay + weights.sum(1)
            if wanted:
                if not shared:
                    weights *= scale[begin : begin + tile]
                if decay is None:
                    mean = weights @ rows
                else:
                    mean.mul_(decay.unsqueeze(1)).addmm_(weights, rows)
            largest = grown
        if wanted:
            # At least 1, but for an empty table.
            mean /= total.clamp(min=1).unsqueeze(1)
            ctx.save_for_backward(mean * scale if shared else mean)
        ctx.mark_non_differentiable(largest)
        return largest + total.log(), largest

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, None, None, None]:
        (mean,) = ctx.saved_tensors
        return grad.unsqueeze(1) * mean, None, None, None
