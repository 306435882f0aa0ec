"""Log-sum-exp of similarities to a large constant table, where these have a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solo_ext.kernels.tiles import tile_rows

BOUND = 40.0
"""Sums of exponentials of -40 to 40 neither overflow in fp32 nor lose what weighs in them."""


def bounded_logsumexp(
    query: Tensor,
    table: Tensor,
    inverse_temperature: float,
    powers: Sequence[float] = (1.0,),
    tile: int | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Log-sum-exp over the rows of a constant table, in one sum without a running maximum.

    ``lse_ei = log sum_j exp(p_e q_i . t_j / T)``, as
    :func:`solo_ext.kernels.table_logsumexp` gives it, of unit rows whose exponents ``p / T``
    bounds: it must be at most :data:`BOUND` for the largest p. Nothing of the table is kept for
    the backward pass.

    Args:
        query: (N, D), fp32 or fp64; the only input that gets a gradient.
        table: (K, D), of the query's dtype, K above 0.
        inverse_temperature: 1 / T.
        powers: (E,) values of p above 0.
        tile: rows of the table at a time; by default what suits the device's cache.
        compute_dtype: of the factors of matrix products, ``torch.bfloat16`` for example.

    Raises:
        RuntimeError: it is differentiated twice.
    """
    if tile is None:
        tile = tile_rows(query, query.shape[0], 64)
    query = query if torch.is_grad_enabled() else query.detach()
    settings = inverse_temperature, tuple(powers), min(tile, len(table)), compute_dtype
    return _Bounded.apply(query, table.detach(), *settings)  # type: ignore[no-any-return, no-untyped-call]


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        table: Tensor,
        inverse_temperature: float,
        powers: tuple[float, ...],
        tile: int,
        dtype: torch.dtype | None,
    ) -> Tensor:
        wanted, count = ctx.needs_input_grad[0], len(query)
        scaled = (query * inverse_temperature).to(dtype or query.dtype)
        total = query.new_zeros(len(powers), count)
        means = query.new_zeros(len(powers), *query.shape) if wanted else None
        # Every tile's, in the dtype of the sums and in that of the factors.
        wide = query.new_empty(count * tile)
        narrow = wide if dtype is None else scaled.new_empty(count * tile)
        for begin in range(0, len(table), tile):
            rows = table[begin : begin + tile].to(scaled.dtype)
            logits, products = (
                room[: count * len(rows)].view(count, -1) for room in (wide, narrow)
            )
            torch.mm(scaled, rows.T, out=products)
            if dtype is not None:
                logits.copy_(products)
            for e, power in enumerate(powers):
                # The last one needs them no more.
                raised = logits if e == len(powers) - 1 else logits.clone()
                weights = (raised if power == 1 else raised.mul_(power)).exp_()
                total[e].add_(weights.sum(1))
                if means is None:
                    continue
                if dtype is None:
                    means[e].addmm_(weights, rows)
                else:
                    means[e].add_(products.copy_(weights) @ rows)
        if means is not None:
            for mean, mass, power in zip(means, total, powers, strict=True):
                mean.mul_((inverse_temperature * power / mass).unsqueeze(1))
        ctx.means = means
        return total.log_()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        to_query = None if ctx.means is None else (grad.unsqueeze(2) * ctx.means).sum(0)
        return to_query, None, None, None, None, None
