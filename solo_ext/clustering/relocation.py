"""Moves means out of local optima: merges two clusters that are close and splits a wide one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solo_ext.clustering.rows import Rows, blocks, exact_scale, on_grid, read_rows, tile_rows
from solo_ext.core.distributed import rank, world_size

# Clusters that are split on trial per step: enough to try a few hundred in five steps, few enough
# to cost less than a step.
_CANDIDATES = 96
# The gain must exceed the cost by this share, so that rounding alone moves nothing.
_MARGIN = 1e-6
# Steps of 2-means per split: more than two hardly improve it.
_STEPS = 2


class Relocation:
    """Relocates means between the steps of Lloyd's algorithm.

    Lloyd's steps only move a mean within its neighbourhood. A relocation merges two clusters that
    are cheap to merge (:func:`merge_costs`) and gives the freed mean to one half of a third cluster
    whose split gains more (:func:`halves`); the mean of an empty cluster is free already. Costs and
    gains are increases and decreases of the sum of squared distances.

    Args:
        rows: the rows to cluster.
        num_clusters: K.
        scale: of the grid of the sums, see :func:`solo_ext.clustering.rows.exact_scale`.

    Source:
        Based on Fritzke, The k-means-u* algorithm, arXiv 1706.09059, with Ward's cost in place of
        his estimate.

    Example:
        >>> from solo_ext.clustering.rows import rows_of
        >>> x = torch.tensor([[0.0], [0.2], [5.0], [5.2]])
        >>> rows, scale = rows_of(x, None, sharded=False), 2.0**20
        >>> sums, sizes = on_grid(x.sum(0, keepdim=True), scale), torch.tensor([4, 0])
        >>> sums = torch.cat((sums, torch.zeros_like(sums)))
        >>> Relocation(rows, 2, scale)(torch.zeros(4).long(), sums, sizes)[1]
        tensor([2, 2])
    """

    def __init__(self, rows: Rows, num_clusters: int, scale: float) -> None:
        self._rows, self._scale, self._draw = rows, scale, 0
        width = rows.features.shape[1]
        self._square_scale = exact_scale(rows.largest * rows.largest * width, rows.total)
        parts = blocks(rows.features, rows.device, tile_rows(max(1, width), rows.device))
        self._squares = torch.cat([self._squared(part) for _, part in parts])
        # Gain of a cluster's last trial split; infinite if it was never tried or has changed since.
        self._tried = torch.full((num_clusters,), torch.inf, dtype=torch.float64)
        self._tried = self._tried.to(rows.device)

    def __call__(self, assignments: Tensor, sums: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Relocates where the gain exceeds the cost.

        Args:
            assignments: (n,) cluster of every row of this rank.
            sums: (K, D) fp64 sums of the clusters of all ranks, on the grid.
            sizes: (K,) int64.

        Returns:
            Sums and sizes after the relocations; the given tensors if there are none.
        """
        means = sums / sizes.clamp_min(1)[:, None] / self._scale
        chosen = self._candidates(assignments, means, sizes)
        split = halves(self._rows, assignments, chosen, sums, sizes, self._scale, self._draw)
        self._draw += 1
        self._tried[chosen] = split.gains
        cost, partner = merge_costs(means, sizes, self._rows)
        # Offer more removals than candidates: a relocation uses up three clusters, and every other
        # removal that involves one of them is then impossible.
        cheap = cost.argsort(stable=True)[: 9 * len(chosen)]
        plan = _matched(chosen, split.gains, cheap, cost[cheap], partner[cheap])
        plan = self._rows.from_first(plan.to(sums.device))
        plan = plan[plan[:, 0] >= 0]
        taker, freed, joined = plan.unbind(1)
        if not len(taker):
            return sums, sizes
        sums, sizes, giver = sums.clone(), sizes.clone(), chosen[taker]
        # An empty cluster is its own partner, and adds 0 here.
        sums[joined] += sums[freed]
        sizes[joined] += sizes[freed]
        sums[freed], sizes[freed] = split.sums[taker], split.sizes[taker]
        sums[giver] -= split.sums[taker]
        sizes[giver] -= split.sizes[taker]
        for made in (giver, freed, joined):
            self._tried[made] = torch.inf
        return sums, sizes

    def _squared(self, part: Tensor) -> Tensor:
        return on_grid(part.to(self._rows.dtype).square().sum(1), self._square_scale)

    def _candidates(self, assignments: Tensor, means: Tensor, sizes: Tensor) -> Tensor:
        within = torch.zeros_like(means[:, 0]).index_add_(0, assignments, self._squares)
        within = self._rows.sum(within) / self._square_scale
        within = (within - sizes * means.square().sum(1)).clamp_min_(0)
        # A split cannot gain more than the cluster's own sum of squares.
        bound = torch.minimum(self._tried, within)
        chosen = bound.argsort(descending=True, stable=True)[:_CANDIDATES]
        return self._rows.from_first(chosen.contiguous())


def _matched(chosen: Tensor, gains: Tensor, freed: Tensor, costs: Tensor, joined: Tensor) -> Tensor:
    """Pairs the best gains with the cheapest removals.

    Returns (M, 3): index in ``chosen``, cluster to free, cluster to join it to; -1 in unused rows.
    """
    plan = torch.full((len(chosen), 3), -1, dtype=torch.int64)
    used: set[int] = set()
    clusters, gained = chosen.tolist(), gains.tolist()
    removals = list(zip(freed.tolist(), joined.tolist(), costs.tolist(), strict=True))
    found = 0
    for place in gains.argsort(descending=True, stable=True).tolist():
        cluster = clusters[place]
        if cluster in used:
            continue
        removals = [r for r in removals if r[0] not in used and r[1] not in used]
        fit = next((r for r in removals if cluster not in r[:2]), None)
        if fit is None or not gained[place] > (1 + _MARGIN) * fit[2]:
            break
        plan[found] = torch.tensor([place, *fit[:2]])
        used |= {cluster, *fit[:2]}
        found += 1
    return plan


class Halves(NamedTuple):
    """One half of each split cluster: sums (M, D) on the grid and sizes (M,) of its rows.

    ``gains`` (M,) is the decrease of the sum of squared distances if each half has its own mean.
    """

    sums: Tensor
    sizes: Tensor
    gains: Tensor


def halves(
    rows: Rows,
    assignments: Tensor,
    chosen: Tensor,
    sums: Tensor,
    sizes: Tensor,
    scale: float,
    draw: int = 0,
) -> Halves:
    """Splits clusters by 2-means of their own rows.

    The first halves are drawn at random from the rows' ids, so that the difference of their means
    points along the cluster's widest directions. Each row is then compared with both halves of its
    cluster. Sums are exact, so the result does not depend on how rows are spread over ranks.

    Args:
        rows: the rows to cluster.
        assignments: (n,) cluster of every row.
        chosen: (M,) int64 clusters to split, each once.
        sums: (K, D) fp64 sums of the clusters, on the grid.
        sizes: (K,) int64.
        scale: of the grid.
        draw: seed of the draw of the first halves.

    Example:
        >>> from solo_ext.clustering.rows import rows_of
        >>> x = torch.tensor([[0.0], [0.2], [5.0], [5.2]])
        >>> rows, scale = rows_of(x, None, sharded=False), 2.0**20
        >>> sums, sizes = on_grid(x.sum(0, keepdim=True), scale), torch.tensor([4])
        >>> halves(rows, torch.zeros(4).long(), torch.tensor([0]), sums, sizes, scale).sizes
        tensor([2])
    """
    place = torch.full_like(sizes, -1)
    place[chosen] = torch.arange(len(chosen), device=chosen.device)
    place = place.index_select(0, assignments)
    members = (place >= 0).nonzero()[:, 0]
    place = place.index_select(0, members)
    whole, count = sums[chosen], sizes[chosen]
    direction = limit = None
    for _ in range(1 + _STEPS):
        sums, sizes = torch.zeros_like(whole), torch.zeros_like(count)
        width = tile_rows(whole.shape[1], whole.device)
        for own, at in zip(torch.split(members, width), torch.split(place, width), strict=True):
            if direction is None or limit is None:
                first = _drawn(rows.ids.index_select(0, own), draw)
            else:
                x = read_rows(rows.features, own, rows.device).to(rows.dtype)
                first = (x * direction.index_select(0, at)).sum(1) > limit.index_select(0, at)
            own, at = own[first], at[first]
            sums.index_add_(0, at, on_grid(read_rows(rows.features, own, rows.device), scale))
            sizes.index_add_(0, at, torch.ones_like(at))
        rows.sum(sums)
        rows.sum(sizes)
        one = sums / sizes.clamp_min(1)[:, None] / scale
        other = (whole - sums) / (count - sizes).clamp_min(1)[:, None] / scale
        apart = one - other
        direction = apart.to(rows.dtype)
        limit = ((one + other) / 2 * apart).sum(1).to(rows.dtype)
    weight = sizes.double() * (count - sizes) / count.clamp_min(1)
    return Halves(sums, sizes, weight * apart.square().sum(1))


def _drawn(ids: Tensor, draw: int) -> Tensor:
    # Draw by a hash of the ids, not by their parity: classes may alternate from row to row.
    mixed = (ids + 1) * (0x9E3779B1 + 2 * draw * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return (mixed >> 16) & 1 > 0


def merge_costs(means: Tensor, sizes: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Increase of the sum of squared distances if a cluster is merged with its cheapest partner.

    ``min_j n_i n_j / (n_i + n_j) |m_i - m_j|^2``. fp32 products find the partner; its cost is
    computed in fp64. The K x K costs are computed in tiles, which are divided between the ranks.

    Args:
        means: (K, D) fp64, the same on all ranks.
        sizes: (K,) int64 numbers of rows; 0 for an empty cluster.
        rows: the rows to cluster.

    Returns:
        The costs (K,), fp64, and the partners (K,), int64. An empty cluster costs 0 and is its own
        partner; if no other cluster has rows, the cost is infinite.

    Source:
        Ward, Journal of the American Statistical Association 58 (301), 1963.

    Example:
        >>> from solo_ext.clustering.rows import rows_of
        >>> means = torch.tensor([[0.0], [1.0], [9.0]], dtype=torch.float64)
        >>> rows = rows_of(means, None, sharded=False)
        >>> cost, partner = merge_costs(means, torch.tensor([1, 1, 1]), rows)
        >>> cost, partner
        (tensor([ 0.5000,  0.5000, 32.0000], dtype=torch.float64), tensor([1, 0, 1]))
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
    size = tile_rows(k, means.device)
    first, ranks = (rank(), world_size()) if rows.shared else (0, 1)
    for start in range(first * size, k, ranks * size):
        own = torch.arange(start, min(k, start + size), device=means.device)
        cost = torch.addmm(squares, centred[own], centred.T, alpha=-2)
        cost += squares[own, None]
        cost *= weight / (weight + weight[own, None]).clamp_min_(1)
        cost.masked_fill_(sizes == 0, torch.inf)
        cost[own - start, own] = torch.inf
        partner[own] = cost.argmin(1)
    # Each tile was computed by one rank and is zero on the others.
    return rows.sum(partner)
