"""k-means at one or several granularities: initial means, backends and the final assignment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solo_ext.clustering.backends import by_faiss, nearest_by_flash, resolve_backend
from solo_ext.clustering.hierarchical import NearestInGroups
from solo_ext.clustering.lloyd import assign, distances_to, lloyd
from solo_ext.clustering.rows import Rows, exact_scale, on_grid, rows_of
from solo_ext.core.distributed import propagate_rank_errors
from solo_ext.core.precision import Precision, matmul_precision


class Clustering(NamedTuple):
    """Result of one k-means clustering.

    Attributes:
        means: (K, D) means of the clusters, not normalised; the same on every rank.
        assignments: (n,) int64 in [0, K), nearest mean of each row of this rank.
        distances: (n,) Euclidean distance of each row of this rank to that mean.
        objective: mean squared distance over the rows of all ranks.
        iterations: steps done; fewer than requested if k-means converged.
        backend: name of the backend that ran.
        sizes: (K,) number of rows of all ranks in each cluster.
        distance_sums: (K,) fp64, sums of the distances in each cluster over all ranks.

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
    sizes: Tensor
    distance_sums: Tensor


def kmeans(
    features: Tensor, num_clusters: int, *, init: Tensor | None = None, **options: Any
) -> Clustering:
    """Clusters rows at one granularity.

    Args:
        features: (n, D), as :func:`multi_granularity_kmeans` takes them.
        num_clusters: K, from 1 to the number of rows of all ranks.
        init: (K, D) initial means, for example of the last epoch; those of rank 0 are used.
        **options: options of :func:`multi_granularity_kmeans`, which also raises its errors.

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
    device: torch.device | str | None = None,
) -> list[Clustering]:
    """Clusters the same rows by Lloyd's algorithm, independently for several numbers of clusters.

    It minimises ``(1 / N) sum_i min_k |x_i - m_k|^2`` locally. A cold start draws K distinct rows
    by ``seed`` on the CPU, the same on every device, rank and backend; the global generators are
    neither read nor changed. A warm start uses ``init``. After every step of a warm start, all
    backends but faiss also relocate: they merge clusters that cost little to merge and split others
    that gain more. From the means of the last epoch, 5 such iterations do the work of several
    restarts. With the torch and hierarchical backends, the means do not depend on how rows are
    spread over ranks. Scores are computed in tiles of bounded size, never as an N x K matrix.

    With ``sample``, k-means runs on that many rows only, drawn without replacement and the same on
    any number of ranks; then all rows are assigned to the resulting means, block by block.

    Args:
        features: (n, D), floating and finite; with ``sharded`` the rows of this rank, n >= 0.
            Half precision is converted to fp32 part by part. Features that are mapped from a file,
            as by ``torch.from_file`` and ``numpy.memmap``, may be larger than the memory.
        num_clusters: K of each clustering, from 1 to the number of rows of all ranks; equal ones
            are allowed.
        init: (K, D) initial means of each clustering, for example of the last epoch; those of
            rank 0 are used.
        iterations: largest number of steps of Lloyd's algorithm, >= 1.
        restarts: number of cold starts, >= 1; the one with the lowest objective is kept.
        seed: of the cold starts of the first clustering; clustering i uses ``seed`` + i.
        backend: "auto", "torch", "hierarchical", "faiss" or "flash", see
            :func:`solo_ext.clustering.resolve_backend`.
        sharded: whether every rank holds a share of the rows; all ranks must then call this.
        row_ids: (n,) indices of the rows among all rows: 0 to N - 1, each on one rank; by default
            in the order of ranks. With them, a cold start does not depend on the spread of rows.
        precision: of the torch backend's products during the steps, as in
            ``torch.set_float32_matmul_precision``; the final assignment is always "highest".
            "medium" suits features whose spread is not small compared with their norm.
        relocate: whether all backends but faiss relocate; by default hierarchical always does, the
            others in warm starts only.
        sample: number of rows that k-means runs on, >= K; all rows by default and if there are no
            more than this.
        sample_seed: seed of the draw of these rows.
        device: the device that computes and holds everything but the features, which are read block
            by block; by default that of the features.

    Returns:
        One clustering for each of ``num_clusters``, in their order. Means and distances are fp64
        for fp64 features, else fp32.

    Raises:
        ValueError: features, K, init or an option are not as described.
        ConfigError: the backend is unknown or cannot run.
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
    device = features.device if device is None else torch.device(device)
    with propagate_rank_errors(device, among=sharded):
        rows = rows_of(features, row_ids, sharded, device)
        seen = rows if sample is None else rows.drawn(sample, sample_seed)
        for size in num_clusters:
            if not 1 <= size <= seen.total:
                raise ValueError(
                    f"num_clusters={size}: there are {seen.total} rows; ask for 1 to that many"
                )
        backend = resolve_backend(backend, device, sharded=rows.shared)
        if relocate is None:
            # With the search in groups, Lloyd's steps alone end in worse optima, even if cold.
            relocate = init is not None or backend == "hierarchical"
        # Restarts are compared on the rows that k-means ran on, without a pass over all rows.
        compared = rows if restarts == 1 else seen
        clusterings = []
        for position, size in enumerate(num_clusters):
            if init is None:
                starts = _random_inits(seen, size, restarts, seed + position)
            else:
                starts = iter([_checked_init(seen, init[position], size)])
            runs = (
                _run_backend(seen, start, iterations, precision, relocate, backend)
                for start in starts
            )
            found = (_final_assignment(compared, *run, backend) for run in runs)
            best = min(found, key=lambda clustering: clustering.objective)
            if compared is not rows:
                best = _final_assignment(rows, best.means, best.iterations, backend)
            clusterings.append(best)
        return clusterings


def _random_inits(rows: Rows, num_clusters: int, restarts: int, seed: int) -> Iterator[Tensor]:
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
    return rows.from_first(init.detach().to(rows.device, rows.dtype, copy=True))


def _run_backend(
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision,
    relocate: bool,
    backend: str,
) -> tuple[Tensor, int]:
    """Runs the iterations of a backend; returns the means (K, D) and the number of steps done."""
    if backend == "faiss":
        return by_faiss(rows.features.contiguous(), means, iterations)
    nearest: Callable[[Tensor], Tensor] | None = None
    if backend == "flash":
        nearest = partial(nearest_by_flash, rows.features)
    elif backend == "hierarchical":
        nearest = NearestInGroups(rows)
    return lloyd(rows, means, iterations, precision, relocate, nearest)


def _final_assignment(rows: Rows, means: Tensor, done: int, backend: str) -> Clustering:
    """Assigns every row to its nearest mean; sums do not depend on the spread over ranks."""
    with matmul_precision("highest"), torch.autocast(means.device.type, enabled=False):
        assignments = assign(rows.features, means)
        distances = distances_to(rows.features, means, assignments)
    squares, scale = _on_grid(rows, distances.double().square())
    objective = float(rows.sum(squares.sum())) / scale / rows.total
    sizes = rows.sum(torch.bincount(assignments, minlength=len(means)))
    lengths, scale = _on_grid(rows, distances)
    sums = lengths.new_zeros(len(means)).index_add_(0, assignments, lengths)
    sums = rows.sum(sums) / scale
    return Clustering(means, assignments, distances, objective, done, backend, sizes, sums)


def _on_grid(rows: Rows, values: Tensor) -> tuple[Tensor, float]:
    """Rounds values (n,) of this rank's rows to a grid with exact sums; also returns its scale."""
    largest = rows.max(values.amax() if len(values) else values.new_zeros(()))
    scale = exact_scale(float(largest), rows.total)
    return on_grid(values, scale), scale
