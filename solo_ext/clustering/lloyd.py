"""Lloyd's iterations, and the search for the nearest mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering.relocation import Relocation
from solo_ext.clustering.rows import Rows, blocks, exact_scale, on_grid, read_rows, tile_rows
from solo_ext.core.precision import Precision, matmul_precision

# Half the distance between the two means of a split cluster, relative to each coordinate.
_PERTURBATION = 1 / 1024
# If more than this share of the means moved, searching all of them is no slower.
_MOST_MOVED = 0.5
# Most rows of a tile on a CPU if only some rows are searched; a third faster than 4096 at K = 45.
_MOST_WANTED = 1024
# Rows that :class:`Nearest` updates at a time: indices of all rows would take most of the memory.
_AT_ONCE = 2**20
# Scores per group in a maximum by groups: on a CPU, the maximum of each group without its index is
# several times faster than a maximum with its index.
_GROUP = 32


def lloyd(
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision = "highest",
    relocate: bool = False,
    nearest: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, int]:
    """Updates the means until no row changes its cluster, or for ``iterations`` steps.

    A step assigns every row to its nearest mean and takes the mean of each cluster, in sums without
    rounding (:func:`solo_ext.clustering.rows.exact_scale`): the result has the same bits for any
    order of the rows and any spread over ranks, except for rows so near to two means that the
    product cannot tell them apart. For each empty cluster, one of the largest clusters is split:
    the two means become ``m (1 + e)`` and ``m (1 - e)``, e = 1/1024 in even coordinates and -1/1024
    in odd ones. A cluster is split only once in a step, and only if it has at least two rows.

    With ``relocate`` every step ends with :class:`solo_ext.clustering.relocation.Relocation`, which
    also acts when the steps alone have converged, and handles empty clusters first. ``nearest``
    maps the means (K, D) to the index (n,) of the mean that each row is assigned to; by default it
    is :class:`Nearest`.

    Returns:
        The means (K, D) and the number of steps done.

    Example:
        >>> from solo_ext.clustering.rows import rows_of
        >>> x = torch.tensor([[0.0], [0.2], [5.0], [5.2]])
        >>> means, steps = lloyd(rows_of(x, None, sharded=False), x[:2].clone(), iterations=9)
        >>> means.sort(dim=0).values.flatten()
        tensor([0.1000, 5.1000])
    """
    scale = exact_scale(rows.largest, rows.total)
    all_sums = torch.zeros_like(means, dtype=torch.float64)
    all_sizes = torch.zeros(len(means), dtype=torch.int64, device=means.device)
    relocation = Relocation(rows, len(means), scale) if relocate else None
    nearest = nearest or Nearest(rows.features)
    assignments = None
    done = 0
    with matmul_precision(precision), torch.autocast(means.device.type, enabled=False):
        while done < iterations:
            done += 1
            old, assignments = assignments, nearest(means)
            moved = _follow(rows, scale, old, assignments, all_sums, all_sizes)
            sums, sizes = all_sums, all_sizes
            if relocation is not None:
                # Rows follow a relocated mean only in the next step, so `all_sums` stays as it is.
                sums, sizes = relocation(assignments, sums, sizes)
            if not moved and sums is all_sums:
                break
            updated = sums / sizes.clamp_min(1)[:, None] / scale
            updated = torch.where(sizes[:, None] > 0, updated, means.double())
            updated = _refilled(updated, sizes).to(means.dtype)
            if torch.equal(updated, means):
                break
            means = updated
    return means, done


def _follow(
    rows: Rows, scale: float, old: Tensor | None, new: Tensor, sums: Tensor, sizes: Tensor
) -> int:
    """Updates sums and sizes by the rows that changed their cluster; returns their number."""
    change, count = torch.zeros_like(sums), torch.zeros_like(sizes)
    moved = (new != (-1 if old is None else old)).nonzero()[:, 0]
    for part in torch.split(moved, tile_rows(sums.shape[1], rows.device)):
        values = on_grid(read_rows(rows.features, part, rows.device), scale)
        ones = torch.ones_like(part)
        target = new.index_select(0, part)
        change.index_add_(0, target, values)
        count.index_add_(0, target, ones)
        if old is not None:
            source = old.index_select(0, part)
            change.index_add_(0, source, values.neg_())
            count.index_add_(0, source, ones.neg_())
    sums += rows.sum(change)
    sizes += rows.sum(count)
    return int(rows.sum(torch.tensor(len(moved), device=rows.device)))


def _refilled(means: Tensor, sizes: Tensor) -> Tensor:
    empty = (sizes == 0).nonzero()[:, 0]
    if not len(empty):
        return means
    donors = sizes.argsort(descending=True, stable=True)[: len(empty)]
    donors = donors[sizes[donors] >= 2]
    # Empty clusters without a donor stay empty until a later step, when the halves have grown.
    empty = empty[: len(donors)]
    step = torch.full((means.shape[1],), _PERTURBATION, dtype=means.dtype, device=means.device)
    step[1::2] *= -1
    whole = means[donors]
    means[empty] = whole * (1 + step)
    means[donors] = whole * (1 - step)
    return means


class Nearest:
    """Keeps the index (n,) of every row's nearest mean up to date; of ties, the first.

    A row whose nearest mean did not move is compared only with the means that moved: the other
    means were farther away and still are.

    Example:
        >>> nearest = Nearest(torch.tensor([[0.1], [0.9]]))
        >>> nearest(torch.tensor([[0.0], [1.0]])), nearest(torch.tensor([[0.0], [0.15]]))
        (tensor([0, 1]), tensor([1, 1]))
    """

    def __init__(self, features: Tensor) -> None:
        self._features = features
        self._means: Tensor | None = None

    def __call__(self, means: Tensor) -> Tensor:
        old, self._means = self._means, means
        moved = None if old is None else (means != old).any(1)
        if moved is None or int(moved.sum()) > _MOST_MOVED * len(means):
            self._centre = means.double().mean(0)
            self._best, self._found = search(self._features, means, self._centre)
        else:
            self._found = self._updated(means, moved)
        return self._found

    def _updated(self, means: Tensor, moved: Tensor) -> Tensor:
        found = self._found.clone()
        left, which = moved.index_select(0, found), moved.nonzero()[:, 0]
        for kept in torch.split((~left).nonzero()[:, 0], _AT_ONCE) if len(which) else ():
            score, place = search(self._features, means[which], self._centre, kept)
            mean = which[place]
            best, now = self._best[kept], found[kept]
            nearer = (score > best) | ((score == best) & (mean < now))
            self._best[kept] = torch.where(nearer, score, best)
            found[kept] = torch.where(nearer, mean, now)
        for lost in torch.split(left.nonzero()[:, 0], _AT_ONCE):
            self._best[lost], found[lost] = search(self._features, means, self._centre, lost)
        return found


def assign(features: Tensor, means: Tensor) -> Tensor:
    """Index (n,) of the mean (K, D) that is nearest to every row (n, D); of ties, the first.

    Example:
        >>> assign(torch.tensor([[0.1], [0.9]]), torch.tensor([[0.0], [1.0]]))
        tensor([0, 1])
    """
    return search(features, means, means.double().mean(0))[1]


def search(
    features: Tensor, means: Tensor, centre: Tensor, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Finds every row's largest :func:`scores`, which is that of its nearest mean.

    Returns:
        The scores (m,), and the indices (m,) of their means, int64; of ties, the first.

    Example:
        >>> means = torch.tensor([[0.0], [1.0]])
        >>> best, found = search(torch.tensor([[0.1], [0.9]]), means, means.double().mean(0))
        >>> best.shape, found
        (torch.Size([2]), tensor([0, 1]))
    """
    n = len(features) if wanted is None else len(wanted)
    best = means.new_empty(n)
    found = torch.empty(n, dtype=torch.int64, device=means.device)
    for part, tile in scores(features, means, centre, wanted):
        best[part], found[part] = _first_largest(tile)
    return best, found


def scores(
    features: Tensor, means: Tensor, centre: Tensor, wanted: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Scores of every row with every mean, larger for nearer means, in tiles.

    ``x . (m_k - c) - |m_k - c|^2 / 2 - c . (m_k - c)`` is largest at ``argmin_k |x - m_k|^2`` for
    any centre c. If c is near the means, rounding errors of the product are proportional to the
    spread of the means, not to their distance from the origin.

    Args:
        features: (n, D), floating, on any device.
        means: (K, D), fp32 or fp64; the dtype of the products, which their device computes.
        centre: (D,) fp64. Only scores with the same centre can be compared.
        wanted: (m,) int64 indices of the rows to search; by default all n rows.

    Yields:
        A slice of the m rows, and their scores: K columns, then perhaps padding by -infinity. The
        next tile overwrites them.

    Example:
        >>> means = torch.tensor([[0.0], [1.0]])
        >>> (part, tile), = scores(torch.randn(5, 1), means, means.double().mean(0))
        >>> part.start, tile.shape
        (0, torch.Size([5, 2]))
    """
    n = len(features) if wanted is None else len(wanted)
    centred = means.double() - centre
    bias = -(centred.square().sum(1) / 2 + centred @ centre).to(means.dtype)
    weight = centred.to(means.dtype)
    on_cpu = means.device.type == "cpu"
    if on_cpu and len(means) > 2 * _GROUP:
        fill = -len(means) % _GROUP
        weight = F.pad(weight, (0, 0, 0, fill))
        bias = F.pad(bias, (0, fill), value=-torch.inf)
    rows = tile_rows(len(weight), means.device)
    if wanted is not None and on_cpu:
        # Lists of rows are often short: in smaller tiles, less of the last one is padding.
        rows = min(rows, _MOST_WANTED)
    tile_scores = means.new_empty(rows, len(weight))
    # BLAS may sum in another order for another number of rows. Pad all tiles to the same number, so
    # that a row's nearest mean does not depend on the other rows of its tile.
    padded = means.new_zeros(rows, features.shape[1])
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        which = part if wanted is None else wanted[part]
        tile = read_rows(features, which, means.device).to(means.dtype)
        count = len(tile)
        if count < rows:
            padded[:count] = tile
            tile = padded
        torch.addmm(bias, tile, weight.T, out=tile_scores)
        yield part, tile_scores[:count]


def _first_largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    width = scores.shape[1]
    if scores.device.type != "cpu" or width <= 2 * _GROUP:
        best, found = scores.max(dim=1)
        return best, found
    grouped = scores.view(len(scores), -1, _GROUP)
    best, group = grouped.amax(2).max(dim=1)
    place = group[:, None, None].expand(-1, 1, _GROUP)
    within = grouped.gather(1, place)[:, 0].max(dim=1).indices
    return best, group * _GROUP + within


def distances_to(features: Tensor, means: Tensor, assignments: Tensor) -> Tensor:
    """``|x_i - m_{a_i}|`` (n,), as the norm of a difference: exactly 0 for a row equal to its mean.

    Example:
        >>> x, means = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.zeros(1, 2)
        >>> distances_to(x, means, torch.tensor([0, 0]))
        tensor([5., 1.])
    """
    rows = tile_rows(features.shape[1], means.device)
    found = means.new_empty(len(features))
    for part, tile in blocks(features, means.device, rows):
        difference = tile.to(means.dtype) - means.index_select(0, assignments[part])
        found[part] = torch.linalg.vector_norm(difference, dim=1)
    return found
