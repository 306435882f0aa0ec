"""k-means at one or several granularities: starts, Lloyd's iterations and the final assignment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering.backends import by_faiss, nearest_by_flash, resolve_backend
from solo_ext.clustering.relocation import Relocation
from solo_ext.clustering.rows import Rows, exact_scale, on_grid, rows_of, tile_rows
from solo_ext.core.distributed import propagate_rank_errors
from solo_ext.core.precision import Precision, matmul_precision

# Half the distance between the two means of a split cluster, relative to each coordinate.
_PERTURBATION = 1 / 1024
# If more than this share of the means moved, searching all of them is no slower.
_MOST_MOVED = 0.5
# Scores whose maximum is taken first, without its place: on a CPU that is several times faster than
# a maximum with its place.
_GROUP = 32


class Clustering(NamedTuple):
    """Clusters of rows.

    Attributes:
        means: (K, D) means of the clusters, not normalised; the same on every rank.
        assignments: (n,) int64 in [0, K), nearest mean of each row of this rank.
        distances: (n,) Euclidean distance of each row of this rank to that mean.
        objective: mean squared distance over the rows of all ranks.
        iterations: steps done; fewer than asked for if it converged.
        backend: name of the backend that ran.

    Example:
        >>> kmeans(torch.eye(4), 4).assignments.sort().values
        tensor([0, 1, 2, 3])
    """

    means: Tensor
    assignments: Tensor
    distances: Tensor
    objective: float
    iterations: int
    backend: str


def kmeans(
    features: Tensor, num_clusters: int, *, init: Tensor | None = None, **options: Any
) -> Clustering:
    """Clusters rows at one granularity.

    Args:
        features: (n, D), as :func:`multi_granularity_kmeans` takes them.
        num_clusters: K, from 1 to the number of rows of all ranks.
        init: (K, D) first means, for example of the last epoch; rank 0's are used.
        **options: those of :func:`multi_granularity_kmeans`, whose errors they raise.

    Example:
        >>> found = kmeans(torch.tensor([[0.0], [0.2], [5.0], [5.2]]), 2)
        >>> found.means.sort(dim=0).values
        tensor([[0.1000],
                [5.1000]])
        >>> round(found.objective, 4)
        0.01
    """
    inits = None if init is None else [init]
    return multi_granularity_kmeans(features, [num_clusters], init=inits, **options)[0]


@torch.no_grad()
def multi_granularity_kmeans(
    features: Tensor,
    num_clusters: Sequence[int],
    *,
    init: Sequence[Tensor] | None = None,
    iterations: int = 20,
    restarts: int = 1,
    seed: int = 0,
    backend: str = "auto",
    sharded: bool = False,
    row_ids: Tensor | None = None,
    precision: Precision = "medium",
    relocate: bool | None = None,
    sample: int | None = None,
    sample_seed: int = 0,
) -> list[Clustering]:
    """Clusters the same rows by Lloyd's algorithm, independently for several numbers of clusters.

    Looks for means that make ``(1 / N) sum_i min_k |x_i - m_k|^2`` small. A cold start draws K
    distinct rows by ``seed`` on the CPU, the same on every device, rank and backend; the global
    generators are neither read nor changed. A warm start takes ``init``: from the means of the last
    epoch, 5 iterations do the work of several restarts, because all backends but faiss then also
    relocate: after every step they merge clusters that cost little to merge and split others that
    gain more. With the torch backend the means do not depend on how rows are spread over ranks.
    Besides the features it takes a bounded tile of scores, never an N x K matrix.

    With ``sample`` k-means runs on that many rows only, drawn without replacement and the same on
    any number of ranks; then all rows are assigned to its means, block by block.

    Args:
        features: (n, D), floating and finite; with ``sharded`` the rows of this rank, n >= 0.
            Half precision is read as it is and converted to fp32 part by part.
        num_clusters: K of each clustering, from 1 to the number of rows of all ranks; equal ones
            are allowed.
        init: (K, D) first means of each, for example of the last epoch; rank 0's are used.
        iterations: most steps of Lloyd's algorithm, >= 1.
        restarts: number of cold starts, >= 1; the one with the lowest objective is kept.
        seed: of the first clustering's cold starts; the others use ``seed`` + their position.
        backend: "auto", "torch", "faiss" or "flash", see
            :func:`solo_ext.clustering.resolve_backend`.
        sharded: whether every rank holds a share of the rows. All ranks must call.
        row_ids: (n,) numbers of the rows among all: 0 to N - 1, each on one rank. By default rank
            by rank, in order. With them a cold start does not depend on how rows are spread.
        precision: of the torch backend's products during the steps, as in
            ``torch.set_float32_matmul_precision``; the final assignment is always "highest".
            "medium" suits features whose spread is not small beside their norm.
        relocate: whether torch and flash relocate; by default in warm starts only.
        sample: number of rows that k-means runs on, >= K; by default, or if there are no more, all.
        sample_seed: seed of their draw.

    Returns:
        One clustering for each number, in the order of the list. Means and distances are fp64 for
        fp64 features, else fp32.

    Raises:
        ValueError: features, K, init or an option are not as described.
        ConfigError: a backend that is unknown or cannot run.
        RankError: with ``sharded``, another rank failed.

    Example:
        >>> coarse, fine = multi_granularity_kmeans(torch.randn(100, 8), [2, 10])
        >>> coarse.means.shape, fine.means.shape, fine.assignments.shape
        (torch.Size([2, 8]), torch.Size([10, 8]), torch.Size([100]))

    Source:
        Lloyd, IEEE Transactions on Information Theory 28 (2), 1982.
    """
    if iterations < 1 or restarts < 1:
        raise ValueError(f"iterations={iterations}, restarts={restarts}: must be at least 1")
    if init is not None and (len(init) != len(num_clusters) or restarts != 1):
        raise ValueError(
            f"init holds the means of {len(init)} clusterings, restarts={restarts}; pass one "
            f"(K, D) tensor for each of the {len(num_clusters)} numbers, and one start"
        )
    with propagate_rank_errors(features.device, among=sharded):
        rows = rows_of(features, row_ids, sharded)
        seen = rows if sample is None else rows.drawn(sample, sample_seed)
        for size in num_clusters:
            if not 1 <= size <= seen.total:
                raise ValueError(
                    f"num_clusters={size}: there are {seen.total} rows; ask for 1 to that many"
                )
        if backend != "torch":
            backend = resolve_backend(backend, features.device, sharded=rows.shared)
        if relocate is None:
            relocate = init is not None
        # Compare several starts on the rows that k-means saw.
        compared = rows if restarts == 1 else seen
        clusterings = []
        for position, size in enumerate(num_clusters):
            if init is None:
                starts = _drawn(seen, size, restarts, seed + position)
            else:
                starts = iter([_checked_init(seen, init[position], size)])
            runs = (
                _moved(seen, start, iterations, precision, relocate, backend) for start in starts
            )
            found = (_assigned(compared, *run, backend) for run in runs)
            best = min(found, key=lambda clustering: clustering.objective)
            if compared is not rows:
                best = _assigned(rows, best.means, best.iterations, backend)
            clusterings.append(best)
        return clusterings


def _drawn(rows: Rows, num_clusters: int, restarts: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(restarts):
        yield rows.select(torch.randperm(rows.total, generator=generator)[:num_clusters])


def _checked_init(rows: Rows, init: Tensor, num_clusters: int) -> Tensor:
    shape = (num_clusters, rows.features.shape[1])
    if tuple(init.shape) != shape or not init.isfinite().all():
        raise ValueError(
            f"init has the shape {tuple(init.shape)}; pass finite means of the shape {shape}, one "
            "for each cluster"
        )
    return rows.from_first(init.detach().to(rows.features.device, rows.dtype, copy=True))


def _moved(
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision,
    relocate: bool,
    backend: str,
) -> tuple[Tensor, int]:
    """The means (K, D) after a backend's iterations, and the number of steps done."""
    if backend == "faiss":
        return by_faiss(rows.features.contiguous(), means, iterations)
    return lloyd(rows, means, iterations, precision, relocate, flash=backend == "flash")


def _assigned(rows: Rows, means: Tensor, done: int, backend: str) -> Clustering:
    """Every row's nearest mean, and an objective that does not depend on the order of rows."""
    with matmul_precision("highest"), torch.autocast(means.device.type, enabled=False):
        assignments = assign(rows.features, means)
        distances = distances_to(rows.features, means, assignments)
    squares = distances.double().square()
    largest = rows.max(squares.amax() if len(squares) else squares.new_zeros(()))
    scale = exact_scale(float(largest), rows.total)
    objective = float(rows.sum(on_grid(squares, scale).sum())) / scale / rows.total
    return Clustering(means, assignments, distances, objective, done, backend)


def lloyd(
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision = "highest",
    relocate: bool = False,
    flash: bool = False,
) -> tuple[Tensor, int]:
    """Updates the means until no row changes its cluster, or for ``iterations`` steps.

    A step assigns every row to its nearest mean and takes the mean of each cluster, in sums without
    rounding (:func:`solo_ext.clustering.rows.exact_scale`): the result has the same bits for any
    order of the rows and any spread over ranks, except for rows so near to two means that the
    product cannot tell them apart. An empty cluster splits one of the largest: the two means become
    ``m (1 + e)`` and ``m (1 - e)``, e = 1/1024 in even coordinates and -1/1024 in odd ones; no two
    empty clusters split the same one, and it must have two rows or more.

    With ``relocate`` every step ends with :class:`solo_ext.clustering.relocation.Relocation`, which
    also acts when the steps alone have converged, and handles empty clusters first. With ``flash``
    flash-kmeans' kernel finds the nearest means, whatever the precision.

    Returns:
        The means (K, D) and the number of steps done.
    """
    scale = exact_scale(rows.largest, rows.total)
    all_sums = torch.zeros_like(means, dtype=torch.float64)
    all_sizes = torch.zeros(len(means), dtype=torch.int64, device=means.device)
    relocation = Relocation(rows, len(means), scale) if relocate else None
    nearest: Callable[[Tensor], Tensor] = (
        partial(nearest_by_flash, rows.features) if flash else Nearest(rows.features)
    )
    assignments = None
    done = 0
    with matmul_precision(precision), torch.autocast(means.device.type, enabled=False):
        while done < iterations:
            done += 1
            old, assignments = assignments, nearest(means)
            moved = _follow(rows, scale, old, assignments, all_sums, all_sizes)
            sums, sizes = all_sums, all_sizes
            if relocation is not None:
                # A relocation moves means, and rows follow in the next step: `all_sums` stays.
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
    """Updates sums and sizes by the rows that changed their cluster; returns how many did."""
    features, change, count = rows.features, torch.zeros_like(sums), torch.zeros_like(sizes)
    moved = (new != (-1 if old is None else old)).nonzero()[:, 0]
    for part in torch.split(moved, tile_rows(features.shape[1], features.device)):
        values = on_grid(features.index_select(0, part), scale)
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
    return int(rows.sum(torch.tensor(len(moved), device=features.device)))


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
    """Keeps the index (n,) of every row's nearest mean up to date; of equally near ones the first.

    A row whose mean stands still is compared only with the means that moved: the others were
    farther away and still are.
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


def assign(features: Tensor, means: Tensor) -> Tensor:
    """Index (n,) of the mean (K, D) that is nearest to every row (n, D); of equal ones the first.

    Example:
        >>> assign(torch.tensor([[0.1], [0.9]]), torch.tensor([[0.0], [1.0]]))
        tensor([0, 1])
    """
    return search(features, means, means.double().mean(0))[1]


def search(
    features: Tensor, means: Tensor, centre: Tensor, wanted: Tensor | None = None
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


def distances_to(features: Tensor, means: Tensor, assignments: Tensor) -> Tensor:
    """``|x_i - m_{a_i}|`` (n,), as the norm of a difference: exactly 0 for a row equal to its mean.

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
