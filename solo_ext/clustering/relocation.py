"""Moves prototypes from where two share what one can stand for to clusters that need two."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.clustering.exact import exact_scale, on_grid
from solo_ext.clustering.merging import merge_costs
from solo_ext.clustering.rows import Rows
from solo_ext.clustering.splitting import halves

# Clusters that are split on trial at a time: enough that five steps get round a few hundred, few
# enough to cost less than a step does. And by how much a relocation must pay.
_CANDIDATES = 96
_MARGIN = 1e-6


class Relocation:
    """Relocates prototypes between the steps of Lloyd's algorithm.

    Lloyd's steps leave every prototype in its neighbourhood. A relocation merges two clusters that
    are cheap to merge (:func:`solo_ext.clustering.merging.merge_costs`) and gives the prototype
    that is left over to one half of a third cluster whose split gains more
    (:func:`solo_ext.clustering.splitting.halves`); of an empty cluster the prototype is free. Gain
    and cost are those of the sum of squares, so that it falls by their difference.

    Source:
        In the manner of Fritzke, The k-means-u* algorithm, arXiv 1706.09059, with Ward's cost for
        what he estimates.
    """

    def __init__(self, rows: Rows, num_clusters: int, scale: float) -> None:
        """Takes the squared norms of the rows.

        Args:
            rows: The rows.
            num_clusters: K.
            scale: Of the grid of the sums.
        """
        self._rows, self._scale, self._draw = rows, scale, 0
        width = rows.features.shape[1]
        self._square_scale = exact_scale(rows.largest * rows.largest * width, rows.total)
        self._squares = torch.cat([self._squared(part) for part in rows.parts()])
        # What a trial found; unknown where the cluster has not been tried since it was made.
        self._tried = torch.full((num_clusters,), torch.inf, dtype=torch.float64)
        self._tried = self._tried.to(rows.features.device)

    def __call__(self, assignments: Tensor, sums: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Relocates where that pays.

        Args:
            assignments: (n,) cluster of every row of this rank.
            sums: (K, D) fp64 sums of the clusters of all ranks, on the grid.
            sizes: (K,) int64.

        Returns:
            Sums and sizes after the relocations; those given, if there are none.
        """
        means = sums / sizes.clamp_min(1)[:, None] / self._scale
        chosen = self._candidates(assignments, means, sizes)
        split = halves(self._rows, assignments, chosen, sums, sizes, self._scale, self._draw)
        self._draw += 1
        self._tried[chosen] = split.gains
        cost, partner = merge_costs(means, sizes, self._rows)
        # More than there are candidates: a relocation blocks all that share a cluster with it.
        cheap = cost.argsort(stable=True)[: 9 * len(chosen)]
        plan = _matched(chosen, split.gains, cheap, cost[cheap], partner[cheap])
        plan = self._rows.from_first(plan.to(sums.device))
        plan = plan[plan[:, 0] >= 0]
        taker, freed, joined = plan.unbind(1)
        if not len(taker):
            return sums, sizes
        sums, sizes, giver = sums.clone(), sizes.clone(), chosen[taker]
        # An empty cluster, which is its own partner, adds nothing.
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
        # No split gains more than there is.
        bound = torch.minimum(self._tried, within)
        chosen = bound.argsort(descending=True, stable=True)[:_CANDIDATES]
        return self._rows.from_first(chosen.contiguous())


def _matched(chosen: Tensor, gains: Tensor, freed: Tensor, costs: Tensor, joined: Tensor) -> Tensor:
    """Best gains with cheapest removals, (M, 3): place in ``chosen``, freed, joined; or -1."""
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
