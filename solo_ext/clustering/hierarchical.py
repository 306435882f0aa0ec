"""Hierarchical k-means: each row is compared with the means of its two nearest groups of means."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from solo_ext.clustering.lloyd import assign, lloyd, scores, search
from solo_ext.clustering.rows import Rows, blocks

# Number of groups that are searched for each row: a step then computes a share of about
# _NEAREST / sqrt(K) of all N x K scores. With one group, rows could not cross a border of groups.
_NEAREST = 2
# Steps of k-means on the means. Groups need not be exact: rows near a border search both sides.
_GROUP_STEPS = 10


class NearestInGroups:
    """Approximate nearest means for Lloyd's algorithm: searches about ``2 sqrt(K)`` of K means.

    The first call clusters the K means themselves into ``round(sqrt(K))`` groups, and stores for
    each row the two groups with the nearest centres; centres and groups of rows do not change
    later. Every call assigns the means to the groups again and compares each row with all means of
    its two groups. A step takes about ``2 N sqrt(K)`` scores in place of ``N K``, and some 50 bytes
    of memory per row. The mean that is found is mostly, not always, the nearest one; at the end
    :func:`solo_ext.clustering.kmeans` assigns rows to the nearest of all means.

    Scores of a row do not depend on the other rows, so means are the same to the last bit for any
    spread of the rows over ranks, as with the torch backend.

    Args:
        rows: the rows to cluster.

    Source:
        Clusters of the means of clusters, as in Vo et al., arXiv 2405.15613. There they balance the
        concepts in a data set; here they only make the search faster.

    Example:
        >>> from solo_ext.clustering.rows import rows_of
        >>> x = torch.tensor([[0.0], [0.2], [5.0], [5.2]])
        >>> NearestInGroups(rows_of(x, None, False))(torch.tensor([[0.1], [5.1]]))
        tensor([0, 0, 1, 1])
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._centres: Tensor | None = None

    def __call__(self, means: Tensor) -> Tensor:
        features = self._rows.features
        if self._centres is None:
            self._centres, self._members = self._grouped(means)
        group = assign(means, self._centres)
        groups = [(group == number).nonzero()[:, 0] for number in range(len(self._centres))]
        centre = means.double().mean(0)
        best = means.new_full((len(features),), -torch.inf)
        found = torch.zeros(len(features), dtype=torch.int64, device=means.device)
        for (part, block), members in zip(
            blocks(features, means.device), self._members, strict=True
        ):
            near, nearest = best[part], found[part]
            for which, own in zip(groups, members, strict=True):
                if not len(which) or not len(own):
                    continue
                score, place = search(block, means[which], centre, own)
                mean, held, old = which[place], near[own], nearest[own]
                nearer = (score > held) | ((score == held) & (mean < old))
                near[own] = torch.where(nearer, score, held)
                nearest[own] = torch.where(nearer, mean, old)
        # Refills and relocations may have moved all means out of both groups of a row: search all
        # means for such rows.
        missed = best.isneginf().nonzero()[:, 0]
        found[missed] = search(features, means, centre, missed)[1]
        return found

    def _grouped(self, means: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Centres (G, D) of the groups; and, for each block of rows, the members of each group.

        A row is a member of its ``_NEAREST`` nearest groups; members are indices in the block.
        """
        count = round(math.sqrt(len(means)))
        ids = torch.arange(len(means), device=means.device)
        largest = float(means.abs().amax())
        # Every rank has all means, so no communication is needed.
        level = replace(
            self._rows, features=means, ids=ids, total=len(means), largest=largest, shared=False
        )
        centres, _ = lloyd(level, means[:count].clone(), _GROUP_STEPS)
        probed = min(_NEAREST, count)
        centre, members = centres.double().mean(0), []
        for _, block in blocks(self._rows.features, means.device):
            near = torch.empty(len(block), probed, dtype=torch.int64, device=means.device)
            for part, tile in scores(block, centres, centre):
                near[part] = tile.topk(probed).indices
            near = near.flatten()
            sizes = torch.bincount(near, minlength=count).tolist()
            members.append(torch.split(near.argsort(stable=True) // probed, sizes))
        return centres, members
