"""Log-sum-exps of similarities to a large constant table, and means of its rows.

The plain form holds the matrix of similarities of N queries to K rows. The tiled form and, on a
GPU, the Triton kernel of ``fused_logsumexp`` read the table once and hold a part of that matrix
at a time, so that memory does not grow with K. :func:`solo_ext.kernels.dispatch.run` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.dispatch import once_differentiable, tile_rows, tiles_of

BOUND = 40.0
"""For logits up to +-40, sums of exponentials neither overflow in fp32 nor lose relevant terms."""


class Sweep(NamedTuple):
    """Settings of one pass over a table; names are those of :func:`table_logsumexp`.

    Attributes:
        ids: (N,) or (N, m) ids of the queries, and (K,) of the rows of the table.
        bounded: whether logits are small enough to sum without a running maximum.

    Example:
        >>> Sweep(scale=5.0, columns=torch.tensor([0, 2])).powers
        (1.0,)
    """

    scale: float
    columns: Tensor | None = None
    log_weight: Tensor | None = None
    powers: tuple[float, ...] = (1.0,)
    bounded: bool = False
    dtype: torch.dtype | None = None
    ids: tuple[Tensor, Tensor] | None = None


def exclude_ids(logits: Tensor, query_ids: Tensor, table_ids: Tensor) -> Tensor:
    """Sets logits (N, K) in place to minus infinity where a row has one of the query's ids.

    Example:
        >>> query_ids, table_ids = torch.tensor([[5, 7], [9, 9]]), torch.tensor([7, 8, 9])
        >>> exclude_ids(torch.zeros(2, 3), query_ids, table_ids)
        tensor([[-inf, 0., 0.],
                [0., 0., -inf]])
    """
    for ids in query_ids.view(len(query_ids), -1).unbind(1):
        logits.masked_fill_(ids.unsqueeze(1) == table_ids, float("-inf"))
    return logits


Sums = Callable[[Sweep, Tensor, Tensor, bool], tuple[Tensor, Tensor | None, Tensor]]
"""A function with the arguments and results of :func:`tiled_sums`."""


def plain_sums(sweep: Sweep, query: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps (E, N), and the largest logits (N,), from the matrix of all logits.

    Example:
        >>> lse, largest = plain_sums(Sweep(scale=5.0), torch.randn(4, 8), torch.randn(1000, 8))
        >>> lse.shape, largest.shape
        (torch.Size([1, 4]), torch.Size([4]))
    """
    scale, columns, log_weight, powers, bounded, dtype, ids = sweep
    rows = table if columns is None else table.index_select(0, columns)
    dtype = dtype or query.dtype
    scaled = query if scale == 1 else query * scale
    logits = (scaled.to(dtype) @ rows.to(dtype).T).to(query.dtype)
    if ids is not None:
        logits = exclude_ids(logits, *ids)
    if bounded or not len(rows):
        largest = query.new_full((len(query),), float("nan" if bounded else "-inf"))
    else:
        largest = logits.detach().amax(1)
    raised = [logits if power == 1 else logits * power for power in powers]
    if log_weight is not None:
        raised = [x + log_weight for x in raised]
    sums = [x.logsumexp(1) for x in raised]
    return sums[0].unsqueeze(0) if len(sums) == 1 else torch.stack(sums), largest


def with_slopes(sums: Sums, sweep: Sweep, query: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps (E, N) with the query's gradient, which is the mean; largest logits (N,).

    Example:
        >>> query, table = torch.randn(4, 8, requires_grad=True), torch.randn(1000, 8)
        >>> with_slopes(tiled_sums, Sweep(scale=5.0), query, table)[0].requires_grad
        True
    """
    return _WithSlopes.apply(query, table, sweep, sums)  # type: ignore[no-any-return, no-untyped-call]


class _WithSlopes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, table: Tensor, sweep: Sweep, sums: Sums
    ) -> tuple[Tensor, Tensor]:
        lse, slopes, largest = sums(sweep, query, table, ctx.needs_input_grad[0])
        if slopes is not None:
            for slope, power in zip(slopes, sweep.powers, strict=True):
                if power * sweep.scale != 1:
                    slope *= power * sweep.scale
        ctx.slopes = slopes
        ctx.mark_non_differentiable(largest)
        # Else autograd would make zeros for the gradient of `largest`.
        ctx.set_materialize_grads(False)
        return lse, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        to_query = None
        if ctx.slopes is not None and grad is not None:
            weighted = grad.unsqueeze(2) * ctx.slopes
            to_query = weighted[0] if len(weighted) == 1 else weighted.sum(0)
        return to_query, None, None, None


def tiled_sums(
    sweep: Sweep, query: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-sum-exps (E, N), softmax means of rows (E, N, D) if ``wanted``, largest logits (N,).

    Example:
        >>> query, table = torch.randn(4, 8), torch.randn(1000, 8)
        >>> lse, means, largest = tiled_sums(Sweep(scale=5.0), query, table, wanted=True)
        >>> lse.shape, means.shape
        (torch.Size([1, 4]), torch.Size([1, 4, 8]))
    """
    scale, columns, log_weight, powers, bounded, dtype, ids = sweep
    count = len(table if columns is None else columns)
    tile = min(tile_rows(query, len(query), 64), max(count, 1))
    factors = (query * scale).to(dtype or query.dtype)
    sums = [_Sum(query, wanted, bounded) for _ in powers]
    largest = query.new_full((len(query),), float("nan" if bounded else "-inf"))
    # Buffers that all tiles share, in the dtype of the sums and in that of the factors.
    wide = query.new_empty(len(query) * tile)
    narrow = wide if dtype is None else factors.new_empty(len(query) * tile)
    for part in tiles_of(count, tile):
        # On a CPU indexing by a tensor takes several times as long as index_select.
        rows = table[part] if columns is None else table.index_select(0, columns[part])
        rows = rows.to(factors.dtype)
        logits, products = (
            x[: len(query) * len(rows)].view(len(query), -1) for x in (wide, narrow)
        )
        torch.mm(factors, rows.T, out=products)
        if dtype is not None:
            logits.copy_(products)
        if ids is not None:
            exclude_ids(logits, ids[0], ids[1][part])
        if log_weight is not None and not bounded:
            largest = torch.maximum(largest, logits.amax(1))
        for e, power in enumerate(powers):
            # Overwrite the logits only for the last power: nothing needs them afterwards.
            raised = logits if e == len(powers) - 1 else logits.clone()
            if power != 1:
                raised.mul_(power)
            if log_weight is not None:
                raised.add_(log_weight[part])
            sums[e].add(raised, rows, None if dtype is None else products)
    if log_weight is None and not bounded:
        largest = sums[0].largest / powers[0]
    lse = torch.stack([s.largest + s.total.log() for s in sums])
    means = torch.stack([s.mean for s in sums if s.mean is not None]) if wanted else None
    if means is not None:
        # The total is 0 only if no row has weight; the mean is then 0.
        tiny = torch.finfo(query.dtype).tiny
        means /= torch.stack([s.total for s in sums]).clamp_(min=tiny).unsqueeze(2)
    return lse, means, largest


class _Sum:
    """Running sum of one power's exponentials, and of the rows weighted by them.

    Both are divided by ``exp(largest)``; ``largest`` is the largest logit so far, or 0 for bounded
    logits.
    """

    def __init__(self, query: Tensor, wanted: bool, bounded: bool) -> None:
        self._bounded = bounded
        self.largest = query.new_full(query.shape[:1], 0.0 if bounded else float("-inf"))
        self.total = torch.zeros_like(self.largest)
        self.mean = torch.zeros_like(query) if wanted else None

    def add(self, logits: Tensor, rows: Tensor, narrow: Tensor | None) -> None:
        """Adds a tile of logits; overwrites it and ``narrow``, a buffer in the factors' dtype."""
        if not self._bounded:
            grown = torch.maximum(self.largest, logits.amax(1))
            # If no row has weight yet, the maximum is -inf: -inf - (-inf) would be NaN.
            shift = grown.clamp(min=torch.finfo(grown.dtype).min)
            logits.sub_(shift.unsqueeze(1))
            decay = (self.largest - shift).exp_()
            self.total *= decay
            if self.mean is not None:
                self.mean *= decay.unsqueeze(1)
            self.largest = grown
        weights = logits.exp_()
        self.total += weights.sum(1)
        if self.mean is None:
            return
        if narrow is None:
            self.mean.addmm_(weights, rows)
        else:
            self.mean += narrow.copy_(weights) @ rows


def table_logsumexp(
    query: Tensor,
    table: Tensor,
    scale: float,
    *,
    powers: Sequence[float] = (1.0,),
    columns: Tensor | None = None,
    log_weight: Tensor | None = None,
    query_ids: Tensor | None = None,
    table_ids: Tensor | None = None,
    unit: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the rows of a constant table.

    ``lse_ei = log sum_j w_j exp(p_e scale q_i . t_j)``. Except in the plain form, the query's
    gradient ``sum_j softmax_ij p scale t_j`` is computed in the forward pass, and the table is not
    kept for the backward pass.

    Args:
        query: (N, D), fp32 or fp64; the only input that gets a gradient.
        table: (K, D), of the query's dtype or of that of the factors; K may be 0.
        scale: inverse temperature.
        powers: (E,) values of p above 0, all computed from the same similarities.
        columns: (C,) indices of the rows that are summed, with repeats; by default each row once.
        log_weight: (C,) log w; minus infinity leaves a row out; all zero by default.
        query_ids: (N,) or (N, m) integers; rows with one of the query's ids are left out of its
            sum.
        table_ids: (C,) ids of the rows that are summed; only together with ``query_ids``.
        unit: whether no ``|q_i . t_j|`` is above 1. If power times scale is then at most
            :data:`BOUND`, the sums need no running maximum.
        compute_dtype: dtype of the factors of matrix products, ``torch.bfloat16`` for example; sums
            and exponentials stay in the query's dtype, which is also the default.

    Returns:
        ``lse`` (E, N), minus infinity where no row has weight, and the largest ``scale q_i . t_j``
        (N,) without gradient, also over rows without weight; it may be NaN if ``unit``.

    Example:
        >>> query, table = torch.randn(4, 8), torch.randn(1000, 8)
        >>> lse, largest = table_logsumexp(query, table, 5.0)
        >>> torch.allclose(lse[0], (5.0 * query @ table.T).logsumexp(1), rtol=1e-5)
        True
    """
    bounded = unit and max(powers) * scale <= BOUND
    ids = None if query_ids is None or table_ids is None else (query_ids, table_ids)
    sweep = Sweep(scale, columns, log_weight, tuple(powers), bounded, compute_dtype, ids)
    query, table = query if torch.is_grad_enabled() else query.detach(), table.detach()
    forms: dict[dispatch.Form, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "plain": lambda query: plain_sums(sweep, query, table),
        "tiles": lambda query: with_slopes(tiled_sums, sweep, query, table),
    }
    if ids is None and dispatch.has_fused(query):
        forms["fused"] = lambda query: with_slopes(_fused_sums, sweep, query, table)
    count = len(table if columns is None else columns)
    details = columns is None, log_weight is None, len(powers), bounded, compute_dtype
    operation = "table_logsumexp" if ids is None else "table_logsumexp of others"
    return dispatch.run(operation, forms, [query], count, *details)


@torch.no_grad()
def table_mean(query: Tensor, table: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``log sum_j exp(scale q_i . t_j)`` (N,) and ``sum_j softmax_j(scale q_i . t_j) t_j`` (N, D).

    For queries (N, D) and a table (K, D), fp32 or fp64, without gradient; means are 0 for K = 0.

    Example:
        >>> query, table = torch.randn(4, 8), torch.randn(1000, 8)
        >>> lse, mean = table_mean(query, table, 5.0)
        >>> torch.allclose(mean, (5.0 * query @ table.T).softmax(1) @ table, atol=1e-5)
        True
    """

    def plain(query: Tensor) -> tuple[Tensor, Tensor]:
        logits = (query * scale) @ table.T
        return logits.logsumexp(1), logits.softmax(1) @ table

    def first(sums: Sums, query: Tensor) -> tuple[Tensor, Tensor]:
        lse, mean, _ = sums(Sweep(scale), query, table, True)
        assert mean is not None
        return lse[0], mean[0]

    forms: dict[dispatch.Form, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "plain": plain,
        "tiles": lambda query: first(tiled_sums, query),
    }
    if dispatch.has_fused(query):
        forms["fused"] = lambda query: first(_fused_sums, query)
    return dispatch.run("table_mean", forms, [query], len(table))


def _fused_sums(
    sweep: Sweep, query: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Computes :func:`tiled_sums` by the Triton kernels."""
    # Import it only here: without Triton, the import would fail.
    from solo_ext.kernels.fused_logsumexp import fused_logsumexp

    rest = sweep.columns, sweep.log_weight, sweep.dtype or query.dtype, wanted
    found = [fused_logsumexp(query, table, sweep.scale * p, *rest) for p in sweep.powers]
    lse, largest, means = zip(*found, strict=True)
    top = largest[0] if sweep.powers[0] == 1 else largest[0] / sweep.powers[0]
    if len(found) == 1:
        # For a single power, avoid the copies that stack makes.
        return lse[0].unsqueeze(0), means[0].unsqueeze(0) if wanted else None, top
    return torch.stack(lse), torch.stack(means) if wanted else None, top
