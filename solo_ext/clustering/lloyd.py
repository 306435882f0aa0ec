"""Lloyd's iterations in plain torch, on any device and over any number of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering.feature_file import Features
from solo_ext.clustering.relocation import Relocation
from solo_ext.clustering.rows import Rows, exact_scale, on_grid, tile_rows
from solo_ext.core.precision import Precision, matmul_precision

# Half the distance between the two means of a split cluster, relative to each coordinate.
_PERTURBATION = 1 / 1024
# If more than this share of the means moved, searching all of them is no slower.
_MOST_MOVED = 0.5
# Scores whose maximum is taken first, without its place: on a CPU that is several times faster than
# a maximum with its place.
_GROUP = 32


def lloyd(
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision = "highest",
    relocate: bool = False,
) -> tuple[Tensor, int]:
    """Updates the means until no row changes its cluster, or for ``iterations`` steps.

    A step assigns every row to its nearest mean and takes the mean of each cluster, in sums without
    rounding (:func:`solo_ext.clustering.rows.exact_scale`): the result has the same bits for any
    order of the rows and any spread over ranks, except for rows so near to two means that the
    product cannot tell them apart. An empty cluster splits one of the largest: the two means become
    ``m (1 + e)`` and ``m (1 - e)``, e = 1/1024 in even coordinates and -1/1024 in odd ones; no two
    empty clusters split the same one, and it must have two rows or more.

    With ``relocate`` every step ends with :class:`solo_ext.clustering.relocation.Relocation`, which
    also acts when the steps alone have converged, and handles empty clusters first.

    Args:
        rows: The rows.
        means: (K, D) first means, in the dtype of ``rows``, the same on every rank.
        iterations: Most steps, >= 1.
        precision: Of the products.
        relocate: Whether to move means to where they lower the objective more.

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


class _Sums:
    """Sums and sizes of the clusters, updated by the rows that move."""

    def __init__(self, rows: Rows, num_clusters: int, relocate: bool) -> None:
        device, width = rows.features.device, rows.features.shape[1]
        self._rows = rows
        self._scale = exact_scale(rows.largest, rows.total)
        self._sums = torch.zeros(num_clusters, width, dtype=torch.float64, device=device)
        self._sizes = torch.zeros(num_clusters, dtype=torch.int64, device=device)
        self._assignments: Tensor | None = None
        self._relocation = Relocation(rows, num_clusters, self._scale) if relocate else None

    def move(self, assignments: Tensor) -> int:
        """Assigns the rows to clusters (n,); returns how many rows of all ranks moved."""
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
        """Means (K, D) of the clusters, after relocation.

        An empty cluster that no relocation uses splits a large one, or keeps its old mean. If the
        rows are ``settled`` and nothing is relocated, these are the old means.
        """
        sums, sizes = self._sums, self._sizes
        if self._relocation is not None and self._assignments is not None:
            # Rows follow a relocation in the next step; the sums kept here are unrelocated.
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
    # Empty clusters without a donor wait for a later step, when the halves have grown.
    empty = empty[: len(donors)]
    step = torch.full((means.shape[1],), _PERTURBATION, dtype=means.dtype, device=means.device)
    step[1::2] *= -1
    whole = means[donors]
    means[empty] = whole * (1 + step)
    means[donors] = whole * (1 - step)
    return means


class Nearest:
    """Keeps every row's nearest mean up to date.

    A row whose mean stands still is compared only with the means that moved: the others were
    farther away and still are.
    """

    def __init__(self, features: Features) -> None:
        self._features = features
        self._means: Tensor | None = None

    def __call__(self, means: Tensor) -> Tensor:
        """Index of the nearest mean of every row.

        Args:
            means: (K, D), fp32 or fp64, K as before.

        Returns:
            (n,) int64; among equally near means the first.
        """
        old, self._means = self._means, means
        if old is not None:
            moved = (means != old).any(1)
            which = moved.nonzero()[:, 0]
            if len(which) <= _MOST_MOVED * len(means):
                self._found = self._updated(means, moved, which)
                return self._found
        self._centre = means.double().mean(0)
        self._best, self._found = search(self._features, means, self._centre)
        return self._found

    def _updated(self, means: Tensor, moved: Tensor, which: Tensor) -> Tensor:
        found = self._found.clone()
        left = moved.index_select(0, found)
        lost, kept = left.nonzero()[:, 0], (~left).nonzero()[:, 0]
        if len(which):
            score, place = search(self._features, means[which], self._centre, kept)
            mean = which[place]
            best, now = self._best[kept], found[kept]
            nearer = (score > best) | ((score == best) & (mean < now))
            self._best[kept] = torch.where(nearer, score, best)
            found[kept] = torch.where(nearer, mean, now)
        self._best[lost], found[lost] = search(self._features, means, self._centre, lost)
        return found


def assign(features: Features, means: Tensor) -> Tensor:
    """Index of the nearest mean of every row.

    Args:
        features: (n, D), floating.
        means: (K, D), fp32 or fp64; the dtype of the products.

    Returns:
        (n,) int64; among equally near means the first.

    Example:
        >>> assign(torch.tensor([[0.1], [0.9]]), torch.tensor([[0.0], [1.0]]))
        tensor([0, 1])
    """
    return search(features, means, means.double().mean(0))[1]


def search(
    features: Features, means: Tensor, centre: Tensor, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Largest score of every row and the mean that has it, which is the nearest.

    ``max_k x . (m_k - c) - |m_k - c|^2 / 2 - c . (m_k - c)`` is at ``argmin_k |x - m_k|^2`` for any
    centre c. With a centre amid the means, rounding errors of the product are in proportion to the
    spread of the means and not to their distance from the origin.

    Args:
        features: (n, D), floating.
        means: (K, D), fp32 or fp64; the dtype of the products.
        centre: (D,) fp64. Only scores with the same centre can be compared.
        wanted: (m,) int64 numbers of the rows to search; by default all.

    Returns:
        The scores (m,) and the means (m,), int64; among equal scores the first.
    """
    n = len(features) if wanted is None else len(wanted)
    centred = means.double() - centre
    bias = -(centred.square().sum(1) / 2 + centred @ centre).to(means.dtype)
    weight = centred.to(means.dtype)
    if features.device.type == "cpu" and len(means) > 2 * _GROUP:
        fill = -len(means) % _GROUP
        weight = F.pad(weight, (0, 0, 0, fill))
        bias = F.pad(bias, (0, fill), value=-torch.inf)
    rows = tile_rows(len(weight), features.device)
    scores = means.new_empty(rows, len(weight))
    best = means.new_empty(n)
    found = torch.empty(n, dtype=torch.int64, device=features.device)
    # The library may sum in another order for another number of rows. Pad all tiles to the same
    # number, so that a row's nearest mean does not depend on the rows beside it.
    padded = means.new_zeros(rows, features.shape[1])
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        tile = features[part] if wanted is None else features.index_select(0, wanted[part])
        tile = tile.to(means.dtype)
        count = len(tile)
        if count < rows:
            padded[:count] = tile
            tile = padded
        torch.addmm(bias, tile, weight.T, out=scores)
        value, index = _first_largest(scores)
        best[part], found[part] = value[:count], index[:count]
    return best, found


def _first_largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    width = scores.shape[1]
    if scores.device.type != "cpu" or width <= 2 * _GROUP or width % _GROUP:
        best, found = scores.max(dim=1)
        return best, found
    grouped = scores.view(len(scores), -1, _GROUP)
    best, group = grouped.amax(2).max(dim=1)
    place = group[:, None, None].expand(-1, 1, _GROUP)
    within = grouped.gather(1, place)[:, 0].max(dim=1).indices
    return best, group * _GROUP + within


def distances_to(features: Features, means: Tensor, assignments: Tensor) -> Tensor:
    """Euclidean distance of every row to the mean it is assigned to.

    ``|x_i - m_{a_i}|``, as the norm of a difference: exactly 0 for a row equal to its mean.

    Args:
        features: (n, D), floating.
        means: (K, D), fp32 or fp64.
        assignments: (n,) int64 in [0, K).

    Returns:
        (n,) in the dtype of ``means`` and the unit of the features.

    Example:
        >>> x, means = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.zeros(1, 2)
        >>> distances_to(x, means, torch.tensor([0, 0]))
        tensor([5., 1.])
    """
    rows = tile_rows(features.shape[1], features.device)
    found = means.new_empty(len(features))
    for start in range(0, len(features), rows):
        part = slice(start, start + rows)
        difference = features[part].to(means.dtype) - means.index_select(0, assignments[part])
        found[part] = torch.linalg.vector_norm(difference, dim=1)
    return found
