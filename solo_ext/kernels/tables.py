"""Log-sum-exps of similarities to a large constant table, and means of its rows.

:func:`plain_sums` holds the matrix of similarities of N queries to K rows. ``tiles``, and the
Triton kernel of ``fused_logsumexp``, read the table once and hold only a part of the matrix.
``dispatch`` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.tiles import Sums, WithSlopes, tiled_sums

BOUND = 40.0
"""Up to +-40, sums of exponentials neither overflow in fp32 nor lose terms that matter."""


class Sweep(NamedTuple):
    """One pass over a table, as :func:`table_logsumexp` describes it."""

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


def plain_sums(sweep: Sweep, query: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps (E, N), and the largest logits (N,), from the matrix of all logits."""
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


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """The parts as rows; one alone is not copied."""
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
        return lambda query: WithSlopes.apply(query, table, sweep, sums)  # type: ignore[no-any-return, no-untyped-call]

    forms: dict[dispatch.Form, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "plain": lambda query: plain_sums(sweep, query, table),
        "tiles": with_slopes(tiled_sums),
    }
    if dispatch.has_fused(query) and ids is None:
        forms["fused"] = with_slopes(_fused())
    details = type(scale), columns is None, log_weight is None, len(powers), bounded, compute_dtype
    operation = "table_logsumexp" if ids is None else "table_logsumexp of others"
    return dispatch.run(operation, forms, [query], sweep.count(table), *details)


@torch.no_grad()
def table_mean(query: Tensor, table: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``log sum_j exp(scale q_i . t_j)`` (N,) and ``sum_j softmax_j(scale q_i . t_j) t_j`` (N, D).

    Of queries (N, D) and a table (K, D), fp32 or fp64, without gradient; zero means for K = 0.

    Example:
        >>> query, table = torch.randn(4, 8), torch.randn(1000, 8)
        >>> lse, mean = table_mean(query, table, 5.0)
        >>> torch.allclose(mean, (5.0 * query @ table.T).softmax(1) @ table, atol=1e-5)
        True
    """
    sweep = Sweep(scale)

    def plain(query: Tensor) -> tuple[Tensor, Tensor]:
        logits = (query * scale) @ table.T
        return logits.logsumexp(1), logits.softmax(1) @ table

    def of(sums: Sums) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def first(query: Tensor) -> tuple[Tensor, Tensor]:
            lse, mean, _ = sums(sweep, query, table, True)
            assert mean is not None
            return lse[0], mean[0]

        return first

    forms: dict[dispatch.Form, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "plain": plain,
        "tiles": of(tiled_sums),
    }
    if dispatch.has_fused(query):
        forms["fused"] = of(_fused())
    return dispatch.run("table_mean", forms, [query], len(table))


def _fused() -> Sums:
    # Where torch is installed without Triton, this file cannot be imported.
    from solo_ext.kernels.fused_logsumexp import fused_sums

    return fused_sums
