"""What it costs to do without a cluster."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.clustering.assignment import tile_rows
from solo_ext.clustering.rows import Rows
from solo_ext.core.distributed import rank


def merge_costs(means: Tensor, sizes: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Rise of the sum of squares where a cluster is merged with its cheapest partner.

    ``min_j n_i n_j / (n_i + n_j) |m_i - m_j|^2``. The partner is found in fp32 products, the cost
    is computed for it in fp64. The K x K costs are computed in tiles, which the ranks take in turn.

    Args:
        means: (K, D) fp64.
        sizes: (K,) int64 numbers of rows; that of an empty cluster is 0.
        rows: The rows, whose ranks share the work; means and sizes are the same on all of them.

    Returns:
        The costs (K,), fp64, and the partners (K,), int64. An empty cluster costs 0 and is its own
        partner; where there is no other cluster with rows, the cost is infinite.

    Source:
        Ward, Journal of the American Statistical Association 58 (301), 1963.
    """
    partner = _partners(means, sizes, rows)
    itself = torch.arange(len(means), device=means.device)
    partner = torch.where(sizes > 0, partner, itself)
    joined = sizes + sizes[partner]
    weight = sizes.double() * sizes[partner] / joined.clamp_min(1)
    cost = weight * (means - means[partner]).square().sum(1)
    alone = (sizes > 0) & ((partner == itself) | (sizes[partner] == 0))
    return cost.masked_fill(alone, torch.inf), partner


def _partners(means: Tensor, sizes: Tensor, rows: Rows) -> Tensor:
    k = len(means)
    centred = means - means.mean(0)
    centred = (centred / centred.abs().amax().clamp_min(torch.finfo(means.dtype).tiny)).float()
    squares = centred.square().sum(1)
    weight = sizes.float()
    partner = torch.zeros_like(sizes)
    size, ranks = tile_rows(k, means.device), len(rows.counts)
    first = rank() if rows.shared else 0
    for start in range(first * size, k, ranks * size):
        own = torch.arange(start, min(k, start + size), device=means.device)
        cost = torch.addmm(squares, centred[own], centred.T, alpha=-2)
        cost += squares[own, None]
        cost *= weight / (weight + weight[own, None]).clamp_min_(1)
        cost.masked_fill_(sizes == 0, torch.inf)
        cost[own - start, own] = torch.inf
        partner[own] = cost.argmin(1)
    # Every tile is one rank's, and zero on the others.
    return rows.sum(partner)
