"""k-means: the start, the restarts and the final assignment around a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from solo_ext.clustering.assignment import assign, distances_to, tile_rows
from solo_ext.clustering.backends import BACKENDS
from solo_ext.clustering.exact import exact_scale, on_grid
from solo_ext.clustering.rows import Rows
from solo_ext.core.precision import Precision, matmul_precision

# Rows that are assigned at a time, for which a file is read once.
_BLOCK = 2**16


class Clustering(NamedTuple):
    """Clusters of rows.

    Attributes:
        means: (K, D) means of the clusters, not normalised; the same on every rank.
        assignments: (n,) int64 in [0, K), nearest mean of each row of this rank.
        distances: (n,) Euclidean distance of each row of this rank to that mean.
        objective: Mean squared distance over the rows of all ranks.
        iterations: Steps done; fewer than asked for where nothing changed any more.
        backend: Name of the backend that ran.
    """

    means: Tensor
    assignments: Tensor
    distances: Tensor
    objective: float
    iterations: int
    backend: str


@torch.no_grad()
def fit(
    rows: Rows,
    seen: Rows,
    num_clusters: int,
    init: Tensor | None,
    *,
    iterations: int,
    restarts: int,
    seed: int,
    backend: str,
    precision: Precision,
    relocate: bool | None,
) -> Clustering:
    """Clusters rows as :func:`solo_ext.clustering.kmeans` says, whose options these are.

    Args:
        rows: All rows.
        seen: Those that the means are found among; ``rows`` itself where there is no sample.
        num_clusters: K.
        init: (K, D) first means, or ``None``.
        iterations: As there.
        restarts: As there.
        seed: As there.
        backend: One that can run, by its own name.
        precision: As there.
        relocate: As there.

    Raises:
        ValueError: There are fewer rows than clusters, or init does not fit them.
    """
    if num_clusters > rows.total:
        raise ValueError(
            f"num_clusters={num_clusters}: there are only {rows.total} rows; ask for at most that "
            "many clusters"
        )
    if init is None:
        starts = _drawn(seen, num_clusters, restarts, seed)
    else:
        starts = iter([_checked_init(seen, init, num_clusters, restarts)])
    relocate = init is not None if relocate is None else relocate
    # Several starts are compared on the rows that they were made for.
    compared = rows if restarts == 1 else seen
    best: Clustering | None = None
    for start in starts:
        means, done = BACKENDS[backend](seen, start, iterations, precision, relocate)
        found = _assigned(compared, means, done, backend)
        if best is None or found.objective < best.objective:
            best = found
    assert best is not None
    if compared is not rows:
        best = _assigned(rows, best.means, best.iterations, backend)
    return best


def _drawn(rows: Rows, num_clusters: int, restarts: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(restarts):
        yield rows.select(torch.randperm(rows.total, generator=generator)[:num_clusters])


def _assigned(rows: Rows, means: Tensor, done: int, backend: str) -> Clustering:
    n = len(rows.features)
    assignments = torch.empty(n, dtype=torch.int64, device=means.device)
    distances = means.new_empty(n)
    # Whole tiles, so that every row is in the place of its tile that it has among all rows.
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


def _checked_init(rows: Rows, init: Tensor, num_clusters: int, restarts: int) -> Tensor:
    if restarts != 1:
        raise ValueError(
            f"restarts={restarts}: with init every start would be the same; pass one of the two"
        )
    shape = (num_clusters, rows.features.shape[1])
    if tuple(init.shape) != shape or not init.isfinite().all():
        raise ValueError(
            f"init has the shape {tuple(init.shape)}; pass finite means of the shape {shape}, one "
            "for each cluster"
        )
    return rows.from_first(init.detach().to(rows.features.device, rows.dtype, copy=True))
