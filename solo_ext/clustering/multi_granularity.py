"""k-means at several granularities."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from solo_ext.clustering.feature_file import Features
from solo_ext.clustering.fit import Clustering, kmeans
from solo_ext.precision import Precision


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
    """Clusters the same rows independently for several numbers of clusters.

    Each is :func:`solo_ext.clustering.kmeans` with ``seed`` + its position in the list.

    Args:
        features: (n, D), floating and finite.
        num_clusters: Numbers of clusters, at least one; equal ones are allowed.
        init: First means (K, D) of each, for example of the last epoch.
        iterations: As in ``kmeans``; so are the other options.
        restarts: As in ``kmeans``.
        seed: Of the first one's cold starts.
        backend: As in ``kmeans``.
        sharded: As in ``kmeans``.
        row_ids: As in ``kmeans``.
        precision: As in ``kmeans``.
        relocate: As in ``kmeans``.
        sample: As in ``kmeans``; all granularities see the same rows.
        sample_seed: As in ``kmeans``.

    Returns:
        One clustering for each number, in the order of the list.

    Raises:
        ValueError: No number, as many init as there are not numbers, or as in ``kmeans``.
        ConfigError: As in ``kmeans``.
    """
    if not num_clusters:
        raise ValueError("num_clusters is empty; pass at least one number of clusters")
    if init is not None and len(init) != len(num_clusters):
        raise ValueError(
            f"init holds the means of {len(init)} clusterings; pass one (K, D) tensor for each of "
            f"the {len(num_clusters)} numbers in num_clusters"
        )
    return [
        kmeans(
            features,
            count,
            init=None if init is None else init[position],
            iterations=iterations,
            restarts=restarts,
            seed=seed + position,
            backend=backend,
            sharded=sharded,
            row_ids=row_ids,
            precision=precision,
            relocate=relocate,
            sample=sample,
            sample_seed=sample_seed,
        )
        for position, count in enumerate(num_clusters)
    ]
