"""k-means at one or several granularities: starts, restarts and the final assignment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solo_ext.clustering.backends import BACKENDS, Backend, resolve_backend
from solo_ext.clustering.feature_file import FeatureFile, Features
from solo_ext.clustering.lloyd import assign, distances_to
from solo_ext.clustering.rows import Rows, exact_scale, on_grid, rows_of, tile_rows
from solo_ext.core.distributed import propagate_rank_errors
from solo_ext.core.precision import PRECISIONS, Precision, matmul_precision

# Rows that are assigned at a time; a file is read once per block.
_BLOCK = 2**16


class Clustering(NamedTuple):
    """Clusters of rows.

    Attributes:
        means: (K, D) means of the clusters, not normalised; the same on every rank.
        assignments: (n,) int64 in [0, K), nearest mean of each row of this rank.
        distances: (n,) Euclidean distance of each row of this rank to that mean.
        objective: Mean squared distance over the rows of all ranks.
        iterations: Steps done; fewer than asked for if it converged.
        backend: Name of the backend that ran.

    Example:
        >>> found = kmeans(torch.randn(50, 3), 4)
        >>> found.means.shape, found.assignments.shape, found.backend
        (torch.Size([4, 3]), torch.Size([50]), 'torch')
    """

    means: Tensor
    assignments: Tensor
    distances: Tensor
    objective: float
    iterations: int
    backend: str


def kmeans(
    features: Features, num_clusters: int, *, init: Tensor | None = None, **options: Any
) -> Clustering:
    """Clusters rows at one granularity.

    Args:
        features: (n, D), as :func:`multi_granularity_kmeans` takes them.
        num_clusters: K, from 1 to the number of rows of all ranks.
        init: (K, D) first means, for example of the last epoch; rank 0's are used.
        **options: Those of :func:`multi_granularity_kmeans`, whose errors they raise.

    Returns:
        The clustering.

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
    features: Features,
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
    epoch, 5 iterations do the work of several restarts, because the torch backend then also
    relocates: after every step it merges clusters that cost little to merge and splits others that
    gain more, which Lloyd's steps from good means cannot do. With that backend the means do not
    depend on how rows are spread over ranks. Besides the features it needs a bounded tile of
    scores, never an N x K matrix.

    With ``sample`` k-means runs on that many rows only, drawn without replacement and the same on
    any number of ranks; then all rows are assigned to its means, block by block.

    Args:
        features: (n, D), floating and finite; with ``sharded`` the rows of this rank, n >= 0.
            Half precision is read as it is and converted to fp32 part by part. A
            :class:`solo_ext.clustering.FeatureFile` is read part by part.
        num_clusters: K of each clustering, from 1 to the number of rows of all ranks; equal ones
            are allowed.
        init: (K, D) first means of each, for example of the last epoch; rank 0's are used.
        iterations: Most steps of Lloyd's algorithm, >= 1.
        restarts: Number of cold starts, >= 1; the one with the lowest objective is kept.
        seed: Of the first clustering's cold starts; the others use ``seed`` + their position.
        backend: "auto", "torch", "faiss" or "flash", see
            :func:`solo_ext.clustering.resolve_backend`.
        sharded: Whether every rank holds a share of the rows. All ranks must call.
        row_ids: (n,) numbers of the rows among all: 0 to N - 1, each on one rank. By default rank
            by rank, in order. With them a cold start does not depend on how rows are spread.
        precision: Of the torch backend's products during the steps, as in
            ``torch.set_float32_matmul_precision``; the final assignment is always "highest".
            "medium" suits features whose spread is not small beside their norm.
        relocate: Whether the torch backend relocates; by default in warm starts only.
        sample: Number of rows that k-means runs on, >= K; by default, or if there are no more, all.
        sample_seed: Seed of their draw.

    Returns:
        One clustering for each number, in the order of the list. Means and distances are fp64 for
        fp64 features, else fp32.

    Raises:
        ValueError: Features, K, init, row numbers or an option are not as described.
        ConfigError: A backend that is unknown or cannot run.
        RankError: With ``sharded``, another rank failed.

    Example:
        >>> coarse, fine = multi_granularity_kmeans(torch.randn(100, 8), [2, 10])
        >>> coarse.means.shape, fine.means.shape, fine.assignments.shape
        (torch.Size([2, 8]), torch.Size([10, 8]), torch.Size([100]))

    Source:
        Lloyd, IEEE Transactions on Information Theory 28 (2), 1982.
    """
    _check_options(num_clusters, init, iterations, restarts, precision, sample)
    with propagate_rank_errors(features.device, among=sharded):
        rows = rows_of(features, row_ids, sharded)
        seen = rows if sample is None else rows.drawn(sample, sample_seed)
        in_file = sample is None and isinstance(features, FeatureFile)
        name = resolve_backend(backend, features.device, sharded=rows.shared, in_file=in_file)
        move: Backend = BACKENDS[name]
        if relocate is None:
            relocate = init is not None
        # Compare several starts on the rows that k-means saw.
        compared = rows if restarts == 1 else seen
        clusterings = []
        for position, size in enumerate(num_clusters):
            if size > rows.total:
                raise ValueError(
                    f"num_clusters={size}: there are only {rows.total} rows; ask for at most that "
                    "many clusters"
                )
            if init is None:
                starts = _drawn(seen, size, restarts, seed + position)
            else:
                starts = iter([_checked_init(seen, init[position], size)])
            best: Clustering | None = None
            for start in starts:
                means, done = move(seen, start, iterations, precision, relocate)
                found = _assigned(compared, means, done, name)
                if best is None or found.objective < best.objective:
                    best = found
            assert best is not None
            if compared is not rows:
                best = _assigned(rows, best.means, best.iterations, name)
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


def _assigned(rows: Rows, means: Tensor, done: int, backend: str) -> Clustering:
    """Every row's nearest mean, and an objective that does not depend on the order of rows."""
    n = len(rows.features)
    assignments = torch.empty(n, dtype=torch.int64, device=means.device)
    distances = means.new_empty(n)
    # Use whole tiles, so that every row has the same place in its tile as among all rows.
    tile = tile_rows(len(means), means.device)
    size = max(1, _BLOCK // tile) * tile
    with matmul_precision("highest"), torch.autocast(means.device.type, enabled=False):
        for start in range(0, n, size):
            own = slice(start, start + size)
            part = rows.features[own]
            assignments[own] = assign(part, means)
            distances[own] = distances_to(part, means, assignments[own])
    squares = distances.double().square()
    largest = rows.max(squares.amax() if len(squares) else squares.new_zeros(()))
    scale = exact_scale(float(largest), rows.total)
    objective = float(rows.sum(on_grid(squares, scale).sum())) / scale / rows.total
    return Clustering(means, assignments, distances, objective, done, backend)


def _check_options(
    num_clusters: Sequence[int],
    init: Sequence[Tensor] | None,
    iterations: int,
    restarts: int,
    precision: str,
    sample: int | None,
) -> None:
    if not num_clusters:
        raise ValueError("num_clusters is empty; pass at least one number of clusters")
    counts = [("num_clusters", size) for size in num_clusters]
    for option, value in [*counts, ("iterations", iterations), ("restarts", restarts)]:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{option}={value!r}: must be an integer of at least 1")
    if init is not None and len(init) != len(num_clusters):
        raise ValueError(
            f"init holds the means of {len(init)} clusterings; pass one (K, D) tensor for each of "
            f"the {len(num_clusters)} numbers in num_clusters"
        )
    if init is not None and restarts != 1:
        raise ValueError(
            f"restarts={restarts}: with init every start would be the same; pass one of the two"
        )
    if sample is not None and sample < max(num_clusters):
        raise ValueError(
            f"sample={sample}: {max(num_clusters)} clusters need as many rows; pass at least "
            f"{max(num_clusters)}, or None for all rows"
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: must be one of {', '.join(PRECISIONS)}")
