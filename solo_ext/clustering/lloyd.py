"""Lloyd's iterations in plain torch, on any device and over any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.clustering.assignment import assign, tile_rows
from solo_ext.clustering.exact import exact_scale, on_grid
from solo_ext.clustering.precision import Precision, matmul_precision
from solo_ext.clustering.rows import Rows

_PERTURBATION = 1 / 1024


class _Sums:
    """Sums and sizes of the clusters, kept up to date by the rows that move."""

    def __init__(self, rows: Rows, num_clusters: int) -> None:
        like, width = rows.features, rows.features.shape[1]
        self._rows = rows
        self._scale = exact_scale(rows.largest, rows.total)
        self._sums = like.new_zeros(num_clusters, width, dtype=torch.float64)
        self._sizes = like.new_zeros(num_clusters, dtype=torch.int64)
        self._assignments: Tensor | None = None

    def move(self, assignments: Tensor) -> int:
        """Moves the rows to the clusters (n,) given; returns how many of all ranks moved."""
        old, features = self._assignments, self._rows.features
        sums, sizes = torch.zeros_like(self._sums), torch.zeros_like(self._sizes)
        if old is None:
            moved = torch.arange(len(assignments), device=assignments.device)
        else:
            moved = (assignments != old).nonzero()[:, 0]
        for part in torch.split(moved, tile_rows(features.shape[1], features.device)):
            values = on_grid(features.index_select(0, part), self._scale)
            ones = torch.ones_like(part)
            target = assignments.index_select(0, part)
            sums.index_add_(0, target, values)
            sizes.index_add_(0, target, ones)
            if old is not None:
                source = old.index_select(0, part)
                sums.index_add_(0, source, values.neg_())
                sizes.index_add_(0, source, ones.neg_())
        self._sums += self._rows.sum(sums)
        self._sizes += self._rows.sum(sizes)
        self._assignments = assignments
        return int(self._rows.sum(torch.tensor(len(moved), device=features.device)))

    def means(self, old: Tensor) -> Tensor:
        """Means (K, D) of the clusters; an empty one splits a large one, or keeps its old mean."""
        means = self._sums / self._sizes.clamp_min(1)[:, None] / self._scale
        means = torch.where(self._sizes[:, None] > 0, means, old.double())
        return _refilled(means, self._sizes).to(old.dtype)


def _refilled(means: Tensor, sizes: Tensor) -> Tensor:
    empty = (sizes == 0).nonzero()[:, 0]
    if not len(empty):
        return means
    donors = sizes.argsort(descending=True, stable=True)[: len(empty)]
    donors = donors[sizes[donors] >= 2]
    # What is left over without a donor gets its turn when the halves have grown.
    empty = empty[: len(donors)]
    step = torch.full((means.shape[1],), _PERTURBATION, dtype=means.dtype, device=means.device)
    step[1::2] *= -1
    whole = means[donors]
    means[empty] = whole * (1 + step)
    means[donors] = whole * (1 - step)
    return means


def lloyd(
    rows: Rows, means: Tensor, iterations: int, precision: Precision = "highest"
) -> tuple[Tensor, int]:
    """Moves the means until no row changes its cluster, or for ``iterations`` steps.

    A step assigns every row to its nearest mean and takes the mean of each cluster, in sums that
    round nothing (:func:`solo_ext.clustering.exact.exact_scale`): the result is the same bits for
    any order of the rows and any way of dealing them out to ranks, but for rows that are as near
    to two means as the product can tell. Of an empty cluster and a largest one the two means are
    set to ``m (1 + e)`` and ``m (1 - e)``, e = 1/1024 in even coordinates and -1/1024 in odd ones;
    every empty cluster has a donor of its own, of two rows or more.

    Args:
        rows: The rows.
        means: (K, D) first means, in the dtype of ``rows``, the same on every rank.
        iterations: Most steps, >= 1.
        precision: Of the products.

    Returns:
        The means (K, D) and the number of steps done.

    Source:
        Lloyd, IEEE Transactions on Information Theory 28 (2), 1982.
    """
    sums = _Sums(rows, len(means))
    done = 0
    moving = True
    with matmul_precision(precision), torch.autocast(means.device.type, enabled=False):
        while moving and done < iterations:
            done += 1
            moving = sums.move(assign(rows.features, means)) > 0
            if moving:
                updated = sums.means(means)
                moving = not torch.equal(updated, means)
                means = updated
    return means, done
