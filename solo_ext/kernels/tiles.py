"""Tiles: how large they are, and log-sum-exps over a table of which one tile is held at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a ``backward`` raise RuntimeError where its result would be differentiated again.

    torch's decorator of this name lets it pass where the incoming gradient is a constant, as for
    a loss itself, and the second derivative is then wrong.

    Example:
        >>> once_differentiable(lambda ctx, gradient: 2 * gradient)(None, torch.ones(1))
        Traceback (most recent call last):
            ...
        RuntimeError: this operation cannot be differentiated twice (create_graph=True): ...
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        # The engine turns gradients on in a backward pass only if a graph of it was asked for.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "this operation cannot be differentiated twice (create_graph=True): it takes its "
                "gradient by hand; a loss's plain form can be, such as "
                "solo_ext.losses.contrastive.plain_contrastive"
            )
        return backward(ctx, *gradients)

    return checked


class Sweep(NamedTuple):
    """One pass over a table, as :func:`solo_ext.kernels.tables.table_logsumexp` describes it.

    Attributes:
        ids: those of the queries and of the table.
        bounded: whether sums need no running maximum.

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


Sums = Callable[[Sweep, Tensor, Tensor, bool], tuple[Tensor, Tensor | None, Tensor]]
"""Maps a sweep, queries, a table, and whether means are wanted, as :func:`tiled_sums` does."""


def with_slopes(sums: Sums, sweep: Sweep, query: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps (E, N) and largest logits (N,), with the query's gradient from the means.

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
        return lse, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        to_query = None
        if ctx.slopes is not None:
            weighted = grad.unsqueeze(2) * ctx.slopes
            to_query = weighted[0] if len(weighted) == 1 else weighted.sum(0)
        return to_query, None, None, None


def tiled_sums(
    sweep: Sweep, query: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-sum-exps (E, N), means of the rows (E, N, D) if ``wanted``, largest logits (N,).

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
            logits.masked_fill_(ids[0].unsqueeze(1) == ids[1][part], float("-inf"))
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
