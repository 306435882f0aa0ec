"""Work in tiles that fit a cache; log-sum-exps over a large table in one pass over it.

:func:`tiled_sums` computes what ``tables`` describes, with the gradient along the way; it holds one
tile of the matrix of similarities, so that memory does not grow with the rows of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from solo_ext.kernels.tables import Sweep

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


Sums = Callable[["Sweep", Tensor, Tensor, bool], tuple[Tensor, Tensor | None, Tensor]]
"""Maps a sweep, queries, a table, and whether means are wanted, to what a form of it returns."""


def tiled_sums(
    sweep: Sweep, query: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-sum-exps (E, N), means of the rows (E, N, D) if ``wanted``, largest logits (N,).

    If rows have their own scales, the means are of the scaled rows.
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


class WithSlopes(torch.autograd.Function):
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
