"""Log-sum-exps of similarities to a large constant table, and means of its rows.

:func:`plain_sums` holds the matrix of similarities of N queries to K rows; :func:`tiled_sums`, and
the Triton kernel of ``fused_logsumexp``, read the table once and hold only a part of it, so that
memory does not grow with K. ``dispatch`` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solo_ext.kernels import dispatch

BOUND = 40.0
"""Up to +-40, sums of exponentials neither overflow in fp32 nor lose terms that matter."""
_TILE_BYTES = {"cpu": 2**20, "cuda": 2**25}
"""Bytes that stay in the cache of a CPU core, and that keep a GPU busy."""


def tile_rows(x: Tensor, columns: int, least: int, share: int = 1) -> int:
    """Rows of a tile with ``columns`` columns of the dtype of ``x`` that suits its device.

    There are at least ``least``; the tile may take ``share`` times the usual budget of memory.

    Example:
        >>> tile_rows(torch.zeros(8, 128), columns=1024, least=64)
        256
    """
    budget = _TILE_BYTES.get(x.device.type, _TILE_BYTES["cuda"]) * share
    return max(budget // (x.element_size() * max(columns, 1)), least)


def tiles_of(count: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``count`` rows in order; the last one may be shorter.

    Example:
        >>> [(part.start, part.stop) for part in tiles_of(5, 2)]
        [(0, 2), (2, 4), (4, 5)]
    """
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


class Sweep(NamedTuple):
    """One pass over a table, as :func:`table_logsumexp` describes it.

    Example:
        >>> sweep = Sweep(scale=5.0, columns=torch.tensor([0, 2]))
        >>> sweep.count(torch.eye(3)), sweep.rows(torch.eye(3), slice(1, 2))
        (2, tensor([[0., 0., 1.]]))
    """

    scale: Tensor | float
    columns: Tensor | None = None
    log_weight: Tensor | None = None
    powers: tuple[float, ...] = (1.0,)
    bounded: bool = False
    dtype: torch.dtype | None = None
    ids: tuple[Tensor, Tensor] | None = None

    def same(self, part: slice = slice(None)) -> Tensor | None:
        """(N, C) which rows of a part have the query's id; ``None`` without ids."""
        if self.ids is None:
            return None
        of_query, of_table = self.ids
        return of_query.unsqueeze(1) == of_table[part]

    def count(self, table: Tensor) -> int:
        """C, the number of rows that are summed."""
        return len(table if self.columns is None else self.columns)

    def rows(self, table: Tensor, part: slice) -> Tensor:
        """The table's rows that are summed, of a part of these."""
        if self.columns is None:
            return table[part]
        # On a CPU indexing by a tensor takes several times as long.
        return table.index_select(0, self.columns[part])

    def fused(
        self, query: Tensor, table: Tensor, wanted: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """As :func:`tiled_sums`, by the Triton kernel."""
        # Where torch is installed without Triton, this file cannot be imported.
        from solo_ext.kernels.fused_logsumexp import fused_sums

        return fused_sums(self, query, table, wanted)


def plain_sums(sweep: Sweep, query: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps (E, N), and the largest logits (N,), from the matrix of all logits.

    Example:
        >>> lse, largest = plain_sums(Sweep(scale=5.0), torch.randn(4, 8), torch.randn(1000, 8))
        >>> lse.shape, largest.shape
        (torch.Size([1, 4]), torch.Size([4]))
    """
    rows = sweep.rows(table, slice(None))
    if isinstance(sweep.scale, Tensor):
        rows = rows * sweep.scale.unsqueeze(1)
    else:
        query = query * sweep.scale
    dtype = sweep.dtype or query.dtype
    logits = (query.to(dtype) @ rows.to(dtype).T).to(query.dtype)
    if (same := sweep.same()) is not None:
        logits = logits.masked_fill(same, float("-inf"))
    if sweep.bounded or not len(rows):
        largest = query.new_full((len(query),), float("nan" if sweep.bounded else "-inf"))
    else:
        largest = logits.detach().amax(1)
    raised = [logits if power == 1 else logits * power for power in sweep.powers]
    if sweep.log_weight is not None:
        raised = [x + sweep.log_weight for x in raised]
    return stacked([x.logsumexp(1) for x in raised]), largest


Sums = Callable[[Sweep, Tensor, Tensor, bool], tuple[Tensor, Tensor | None, Tensor]]
"""Maps a sweep, queries, a table, and whether means are wanted, to what a form of it returns."""


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """The parts as rows; one alone is not copied.

    Example:
        >>> stacked([torch.zeros(3)]).shape, stacked([torch.zeros(3)] * 2).shape
        (torch.Size([1, 3]), torch.Size([2, 3]))
    """
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(list(parts))


def table_logsumexp(
    query: Tensor,
    table: Tensor,
    scale: Tensor | float,
    *,
    powers: Sequence[float] = (1.0,),
    columns: Tensor | None = None,
    log_weight: Tensor | None = None,
    query_ids: Tensor | None = None,
    table_ids: Tensor | None = None,
    bound: float | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the rows of a constant table.

    ``lse_ei = log sum_j w_j exp(p_e scale_j q_i . t_j)``. Unless the plain form is chosen, the
    query's gradient ``sum_j softmax_ij p scale_j t_j`` is computed along the way, and the table is
    not kept for the backward pass.

    Args:
        query: (N, D), fp32 or fp64; the only input that gets a gradient.
        table: (K, D), of the query's dtype or of that of the factors; K may be 0.
        scale: inverse temperature, one for all rows or (C,).
        powers: (E,) values of p above 0, all computed from the same similarities.
        columns: (C,) rows of the table that are summed, repeats allowed; by default each once.
        log_weight: (C,) log w; minus infinity leaves a row out; all zero by default.
        query_ids: (N,) whole numbers; rows with the query's id are left out of its sum.
        table_ids: (C,) ids of the rows that are summed; only together with ``query_ids``.
        bound: upper bound of all ``|scale_j q_i . t_j|``, if known. If ``p bound`` is at most
            :data:`BOUND`, the sums need no running maximum.
        compute_dtype: of the factors of matrix products, ``torch.bfloat16`` for example; sums and
            exponentials stay in the query's dtype, which is also the default.

    Returns:
        ``lse`` (E, N), minus infinity where no row has weight, and the largest
        ``scale_j q_i . t_j`` (N,) without gradient, over rows without weight too; NaN where the
        bound made it unnecessary.

    Example:
        >>> query, table = torch.randn(4, 8), torch.randn(1000, 8)
        >>> lse, largest = table_logsumexp(query, table, 5.0)
        >>> torch.allclose(lse[0], (5.0 * query @ table.T).logsumexp(1), rtol=1e-5)
        True
    """
    bounded = bound is not None and max(powers) * bound <= BOUND
    ids = None if query_ids is None or table_ids is None else (query_ids, table_ids)
    sweep = Sweep(scale, columns, log_weight, tuple(powers), bounded, compute_dtype, ids)
    query, table = query if torch.is_grad_enabled() else query.detach(), table.detach()

    def with_slopes(sums: Sums) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return lambda query: _WithSlopes.apply(query, table, sweep, sums)  # type: ignore[no-any-return, no-untyped-call]

    forms: dict[dispatch.Form, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "plain": lambda query: plain_sums(sweep, query, table),
        "tiles": with_slopes(tiled_sums),
    }
    if dispatch.has_fused(query) and ids is None:
        forms["fused"] = with_slopes(Sweep.fused)
    details = type(scale), columns is None, log_weight is None, len(powers), bounded, compute_dtype
    operation = "table_logsumexp" if ids is None else "table_logsumexp of others"
    return dispatch.run(operation, forms, [query], sweep.count(table), *details)


def tiled_sums(
    sweep: Sweep, query: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-sum-exps (E, N), means of the rows (E, N, D) if ``wanted``, largest logits (N,).

    If rows have their own scales, the means are of the scaled rows.

    Example:
        >>> query, table = torch.randn(4, 8), torch.randn(1000, 8)
        >>> lse, means, largest = tiled_sums(Sweep(scale=5.0), query, table, wanted=True)
        >>> lse.shape, means.shape
        (torch.Size([1, 4]), torch.Size([1, 4, 8]))
    """
    powers, log_weight, scale = sweep.powers, sweep.log_weight, sweep.scale
    count, per_row = sweep.count(table), isinstance(scale, Tensor)
    tile = min(tile_rows(query, len(query), 64), max(count, 1))
    factors = (query if per_row else query * scale).to(sweep.dtype or query.dtype)
    sums = [_Sum(query, wanted, sweep.bounded) for _ in powers]
    largest = query.new_full((len(query),), float("nan" if sweep.bounded else "-inf"))
    # Buffers that all tiles share, in the dtype of the sums and in that of the factors.
    wide = query.new_empty(len(query) * tile)
    narrow = wide if sweep.dtype is None else factors.new_empty(len(query) * tile)
    for part in tiles_of(count, tile):
        rows = sweep.rows(table, part)
        if isinstance(scale, Tensor):
            # Scale the rows rather than the logits: there are fewer numbers.
            rows = rows * scale[part].unsqueeze(1)
        rows = rows.to(factors.dtype)
        logits, products = (
            x[: len(query) * len(rows)].view(len(query), -1) for x in (wide, narrow)
        )
        torch.mm(factors, rows.T, out=products)
        if sweep.dtype is not None:
            logits.copy_(products)
        if (same := sweep.same(part)) is not None:
            logits.masked_fill_(same, float("-inf"))
        if log_weight is not None and not sweep.bounded:
            largest = torch.maximum(largest, logits.amax(1))
        for e, power in enumerate(powers):
            # Overwrite the logits only for the last power: nothing needs them afterwards.
            raised = logits if e == len(powers) - 1 else logits.clone()
            if power != 1:
                raised.mul_(power)
            if log_weight is not None:
                raised.add_(log_weight[part])
            sums[e].add(raised, rows, None if sweep.dtype is None else products)
    if log_weight is None and not sweep.bounded:
        largest = sums[0].largest / powers[0]
    lse = torch.stack([s.largest + s.total.log() for s in sums])
    means = torch.stack([s.mean for s in sums if s.mean is not None]) if wanted else None
    if means is not None:
        # The total is above 0 except for an empty table, whose mean is 0.
        tiny = torch.finfo(query.dtype).tiny
        means /= torch.stack([s.total for s in sums]).clamp_(min=tiny).unsqueeze(2)
    return lse, means, largest


class _Sum:
    """Running sum of one power's exponentials, and of the rows weighted by them.

    Both are divided by ``exp(largest)``, the largest logit so far; it is 0 for bounded logits.
    """

    def __init__(self, query: Tensor, wanted: bool, bounded: bool) -> None:
        self._bounded = bounded
        self.largest = query.new_full(query.shape[:1], 0.0 if bounded else float("-inf"))
        self.total = torch.zeros_like(self.largest)
        self.mean = torch.zeros_like(query) if wanted else None

    def add(self, logits: Tensor, rows: Tensor, narrow: Tensor | None) -> None:
        """Adds a tile of logits; overwrites it and ``narrow``, the buffer for a narrow copy."""
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


class _WithSlopes(torch.autograd.Function):
    """Log-sum-exps by a form that finds the query's gradient in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, table: Tensor, sweep: Sweep, sums: Sums
    ) -> tuple[Tensor, Tensor]:
        lse, slopes, largest = sums(sweep, query, table, ctx.needs_input_grad[0])
        if slopes is not None:
            scale = 1.0 if isinstance(sweep.scale, Tensor) else sweep.scale
            for slope, power in zip(slopes, sweep.powers, strict=True):
                if power * scale != 1:
                    slope *= power * scale
        ctx.slopes = slopes
        ctx.mark_non_differentiable(largest)
        return lse, largest

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        to_query = None
        if ctx.slopes is not None:
            weighted = grad.unsqueeze(2) * ctx.slopes
            to_query = weighted[0] if len(weighted) == 1 else weighted.sum(0)
        return to_query, None, None, None
