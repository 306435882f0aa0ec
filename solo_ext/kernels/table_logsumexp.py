"""Log-sum-exp of similarities to a large table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solo_ext.core.precision import full_precision_products
from solo_ext.kernels.tiles import tile_rows


def table_logsumexp(
    query: Tensor,
    table: Tensor,
    scale: Tensor,
    tile: int | None = None,
    *,
    columns: Tensor | None = None,
    log_weight: Tensor | None = None,
    powers: Sequence[float] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the rows of a table, without the matrix of similarities.

    ``lse_i = log sum_j w_j exp(p scale_j q_i . t_j)``. The table is read once, tile by tile; the
    query's gradient ``sum_j softmax_ij p scale_j t_j`` is made along the way, so that memory does
    not grow with K and nothing of a constant table is kept for the backward pass: it may be
    overwritten before. The gradient of a table that learns is made in the backward pass, tile by
    tile, for it needs the rows' weights in the loss.

    Args:
        query: (N, D), fp32 or fp64.
        table: (K, D), of the query's dtype.
        scale: (C,) or scalar, inverse temperatures, without gradient.
        tile: rows of the table at a time; by default what suits the device's cache.
        columns: (C,) rows of the table that are summed, in any number; each once by default.
            They are gathered tile by tile, but for a table that learns.
        log_weight: (C,) log w, without gradient; minus infinity leaves a row out; all zero by
            default.
        powers: (E,) values of p above 0, all computed from the same similarities; 1 by default.
        compute_dtype: of the factors of matrix products, ``torch.bfloat16`` for example; sums and
            exponentials stay in the query's dtype, which is also the default.

    Returns:
        ``lse`` (N,), or (E, N) where ``powers`` are given; minus infinity where no row has
        weight. And the largest ``scale_j q_i . t_j`` (N,), without gradient; of rows without
        weight, too.

    Raises:
        RuntimeError: it is differentiated twice.
    """
    if tile is None:
        tile = tile_rows(query, query.shape[0], 64)
    if not torch.is_grad_enabled():
        query, table = query.detach(), table.detach()
    if columns is not None and table.requires_grad:
        table, columns = table[columns], None
    settings = tile, tuple(powers or (1.0,)), compute_dtype
    lse, largest = _TableLogSumExp.apply(query, table, scale, columns, log_weight, *settings)  # type: ignore[no-untyped-call]
    return lse if powers is not None else lse[0], largest


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``a @ b`` with factors of ``dtype`` and a result of the dtype of ``a``."""
    return a @ b if dtype is None else (a.to(dtype) @ b.to(dtype)).to(a.dtype)


class RunningSum:
    """Running log-sum-exp of one power, and the weighted mean of the rows."""

    def __init__(self, query: Tensor, wanted: bool) -> None:
        self.largest = query.new_full(query.shape[:1], float("-inf"))
        self.total = torch.zeros_like(self.largest)
        self.mean = torch.zeros_like(query) if wanted else None

    def absorb(self, logits: Tensor, rows: Tensor, dtype: torch.dtype | None) -> None:
        """Adds a tile of logits, which is overwritten."""
        grown = torch.maximum(self.largest, logits.amax(1))
        # Rows without weight leave minus infinity, which cannot be subtracted from itself.
        shift = grown.clamp(min=torch.finfo(grown.dtype).min)
        weights = logits.sub_(shift.unsqueeze(1)).exp_()
        decay = (self.largest - shift).exp_()
        self.total = (self.total * decay).add_(weights.sum(1))
        if self.mean is not None:
            if dtype is None:
                self.mean.mul_(decay.unsqueeze(1)).addmm_(weights, rows)
            else:
                self.mean.mul_(decay.unsqueeze(1)).add_(product(weights, rows, dtype))
        self.largest = grown

    def value(self) -> Tensor:
        return self.largest + self.total.log()


class _TableLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        table: Tensor,
        scale: Tensor,
        columns: Tensor | None,
        log_weight: Tensor | None,
        tile: int,
        powers: tuple[float, ...],
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        wanted, learns = ctx.needs_input_grad[:2]
        sums = [RunningSum(query, wanted) for _ in powers]
        largest = query.new_full(query.shape[:1], float("-inf"))
        scaled = query * scale if scale.ndim == 0 else query
        if dtype is not None:
            scaled = scaled.to(dtype)
        for begin in range(0, len(table if columns is None else columns), tile):
            part = slice(begin, begin + tile)
            rows = table[part if columns is None else columns[part]]
            if scale.ndim:
                # The rows are fewer numbers than the logits, and are weighted scaled.
                rows = rows * scale[part].unsqueeze(1)
            if dtype is not None:
                rows = rows.to(dtype)
            logits = (scaled @ rows.T).to(query.dtype)
            if log_weight is not None:
                largest = torch.maximum(largest, logits.amax(1))
            for power, held in zip(powers, sums, strict=True):
                raised = logits * power if len(powers) > 1 or power != 1 else logits
                if log_weight is not None:
                    raised = raised + log_weight[part]
                held.absorb(raised, rows, dtype)
        if log_weight is None:
            largest = sums[0].largest / powers[0]
        lse = torch.stack([held.value() for held in sums])
        slopes = [scale * power if scale.ndim == 0 else power for power in powers]
        means = [
            # At least 1 at the largest, but for an empty table.
            held.mean / held.total.clamp(min=1).unsqueeze(1) * slope
            for held, slope in zip(sums, slopes, strict=True)
            if held.mean is not None
        ]
        ctx.means = torch.stack(means) if means else None
        if learns:
            ctx.save_for_backward(query, table, scale, log_weight, lse)
            ctx.settings = tile, powers, dtype
        ctx.mark_non_differentiable(largest)
        return lse, largest

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        to_query = None if ctx.means is None else (grad.unsqueeze(2) * ctx.means).sum(0)
        to_table = None
        if ctx.needs_input_grad[1]:
            # The forward pass's precision is its caller's affair; here there is no caller.
            with full_precision_products(grad.device):
                to_table = _table_gradient(ctx, grad)
        return to_query, to_table, *[None] * 6


def _table_gradient(ctx: Any, grad: Tensor) -> Tensor:
    query, table, scale, log_weight, lse = ctx.saved_tensors
    tile, powers, dtype = ctx.settings
    found = torch.empty_like(table)
    lse = lse.clamp(min=torch.finfo(lse.dtype).min)
    for begin in range(0, table.shape[0], tile):
        part = slice(begin, begin + tile)
        own_scale = scale if scale.ndim == 0 else scale[part]
        logits = product(query, table[part].T, dtype) * own_scale
        weights = torch.zeros_like(logits)
        for power, mass, g in zip(powers, lse, grad, strict=True):
            raised = logits * power if log_weight is None else logits * power + log_weight[part]
            weights += (raised - mass.unsqueeze(1)).exp_().mul_(power * g.unsqueeze(1))
        found[part] = product((weights * own_scale).T, query, dtype)
    return found
