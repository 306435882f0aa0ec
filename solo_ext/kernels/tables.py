"""Log-sum-exps of similarities to a large constant table, and means of its rows.

The plain form holds the matrix of similarities of N queries to K rows. The one of ``tiles`` and, on
a GPU, the Triton kernel of ``fused_logsumexp`` read the table once and hold only a part of it, so
that memory does not grow with K. :func:`solo_ext.kernels.dispatch.run` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.tiles import Sums, Sweep, tiled_sums, with_slopes

BOUND = 40.0
"""Up to +-40, sums of exponentials neither overflow in fp32 nor lose terms that matter."""


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
    logits = ((query * scale).to(dtype) @ rows.to(dtype).T).to(query.dtype)
    if ids is not None:
        logits = logits.masked_fill(ids[0].unsqueeze(1) == ids[1], float("-inf"))
    if bounded or not len(rows):
        largest = query.new_full((len(query),), float("nan" if bounded else "-inf"))
    else:
        largest = logits.detach().amax(1)
    raised = [logits if power == 1 else logits * power for power in powers]
    if log_weight is not None:
        raised = [x + log_weight for x in raised]
    return torch.stack([x.logsumexp(1) for x in raised]), largest


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

    ``lse_ei = log sum_j w_j exp(p_e scale q_i . t_j)``. Unless the plain form is chosen, the
    query's gradient ``sum_j softmax_ij p scale t_j`` is computed along the way, and the table is
    not kept for the backward pass.

    Args:
        query: (N, D), fp32 or fp64; the only input that gets a gradient.
        table: (K, D), of the query's dtype or of that of the factors; K may be 0.
        scale: inverse temperature.
        powers: (E,) values of p above 0, all computed from the same similarities.
        columns: (C,) rows of the table that are summed, repeats allowed; by default each once.
        log_weight: (C,) log w; minus infinity leaves a row out; all zero by default.
        query_ids: (N,) whole numbers; rows with the query's id are left out of its sum.
        table_ids: (C,) ids of the rows that are summed; only together with ``query_ids``.
        unit: whether no ``|q_i . t_j|`` is above 1. Up to a scale and power of :data:`BOUND` the
            sums then need no running maximum.
        compute_dtype: of the factors of matrix products, ``torch.bfloat16`` for example; sums and
            exponentials stay in the query's dtype, which is also the default.

    Returns:
        ``lse`` (E, N), minus infinity where no row has weight, and the largest ``scale q_i . t_j``
        (N,) without gradient, over rows without weight too; NaN where it was not needed.

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
    if ids is None and (fused := _fused_sums(query)):
        forms["fused"] = lambda query: with_slopes(fused, sweep, query, table)
    count = len(table if columns is None else columns)
    details = columns is None, log_weight is None, len(powers), bounded, compute_dtype
    operation = "table_logsumexp" if ids is None else "table_logsumexp of others"
    return dispatch.run(operation, forms, [query], count, *details)


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
    if fused := _fused_sums(query):
        forms["fused"] = lambda query: first(fused, query)
    return dispatch.run("table_mean", forms, [query], len(table))


def _fused_sums(query: Tensor) -> Sums | None:
    if not dispatch.has_fused(query):
        return None
    # Where torch is installed without Triton, this file cannot be imported.
    from solo_ext.kernels.fused_logsumexp import fused_sums

    return fused_sums
