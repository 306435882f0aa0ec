"""Lloyd's iterations in plain torch, on any device and over any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.clustering.assignment import tile_rows
from solo_ext.clustering.exact import exact_scale, on_grid
from solo_ext.clustering.nearest import Nearest
from solo_ext.clustering.relocation import Relocation
from solo_ext.clustering.rows import Rows
from solo_ext.core.precision import Precision, matmul_precision

_PERTURBATION = 1 / 1024


class _Sums:
    """Sums and sizes of the clusters, kept up to date by the rows that move."""

    def __init__(self, rows: Rows, num_clusters: int, relocate: bool) -> None:
        device, width = rows.features.device, rows.features.shape[1]
        self._rows = rows
        self._scale = exact_scale(rows.largest, rows.total)
        self._sums = torch.zeros(num_clusters, width, dtype=torch.float64, device=device)
        self._sizes = torch.zeros(num_clusters, dtype=torch.int64, device=device)
        self._assignments: Tensor | None = None
        self._relocation = Relocation(rows, num_clusters, self._scale) if relocate else None

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

    def means(self, old: Tensor, settled: bool) -> Tensor:
        """Means (K, D) of the clusters, some of them relocated.

        An empty one that no relocation takes splits a large one, or keeps its old mean. Where the
        rows are ``settled`` and nothing is relocated, these are the old means.
        """
        sums, sizes = self._sums, self._sizes
        if self._relocation is not None and self._assignments is not None:
            # The rows follow in the next step; the sums here stay those of their clusters.
            sums, sizes = self._relocation(self._assignments, sums, sizes)
        if settled and sums is self._sums:
            return old
        means = sums / sizes.clamp_min(1)[:, None] / self._scale
        means = torch.where(sizes[:, None] > 0, means, old.double())
        return _refilled(means, sizes).to(old.dtype)


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
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision = "highest",
    relocate: bool = False,
) -> tuple[Tensor, int]:
    """Moves the means until no row changes its cluster, or for ``iterations`` steps.

    A step assigns every row to its nearest mean and takes the mean of each cluster, in sums that
    round nothing (:func:`solo_ext.clustering.exact.exact_scale`): the result is the same bits for
    any order of the rows and any way of dealing them out to ranks, but for rows that are as near
    to two means as the product can tell. Of an empty cluster and a largest one the two means are
    set to ``m (1 + e)`` and ``m (1 - e)``, e = 1/1024 in even coordinates and -1/1024 in odd ones;
    every empty cluster has a donor of its own, of two rows or more.

    With ``relocate`` every step ends with :class:`solo_ext.clustering.relocation.Relocation`, which
    goes on where the steps alone would stop, and takes empty clusters first.

    Args:
        rows: The rows.
        means: (K, D) first means, in the dtype of ``rows``, the same on every rank.
        iterations: Most steps, >= 1.
        precision: Of the products.
        relocate: Whether to move prototypes to where they lower the objective more.

    Returns:
        The means (K, D) and the number of steps done.

    Source:
        Lloyd, IEEE Transactions on Information Theory 28 (2), 1982.
    """
    done = 0
    moving = True
    with matmul_precision(precision), torch.autocast(means.device.type, enabled=False):
        nearest, sums = Nearest(rows.features), _Sums(rows, len(means), relocate)
        while moving and done < iterations:
            done += 1
            settled = sums.move(nearest(means)) == 0
            updated = sums.means(means, settled)
            moving = not torch.equal(updated, means)
            means = updated
    return means, done
