"""The E-step of prototypical contrastive learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering.concentration import concentration_of_sums
from solo_ext.clustering.feature_file import Features
from solo_ext.clustering.k_means import Clustering, multi_granularity_kmeans
from solo_ext.clustering.rows import exact_scale, on_grid
from solo_ext.core import distributed
from solo_ext.core.distributed import propagate_rank_errors, rank_barrier


@dataclass(frozen=True)
class Granularity:
    """The clustering of a whole data set into K prototypes; the same on every rank.

    Attributes:
        means: (K, D) as k-means left them.
        prototypes: (K, D) the means, normalised.
        concentration: (K,), whose mean is the temperature.
        assignments: (n,) cluster of every sample, by sample index.
        objective: mean squared distance of the samples to their means.
        empty: number of clusters without a sample.
        singletons: number of clusters of one sample.
    """

    means: Tensor
    prototypes: Tensor
    concentration: Tensor
    assignments: Tensor
    objective: float
    empty: int
    singletons: int


@torch.no_grad()
def e_step(
    features: Features,
    sample_ids: Tensor,
    num_samples: int,
    num_prototypes: Sequence[int],
    *,
    temperature: float,
    alpha: float = 10.0,
    init: Sequence[Tensor] | None = None,
    **kmeans_options: Any,
) -> list[Granularity]:
    """Clusters a data set at several granularities and measures each prototype's concentration.

    Euclidean k-means on unit features; concentrations from the distances to the means as they
    are; then the means are normalised to become prototypes (Algorithm 1).

    Args:
        features: (n_local, D) unit features of the samples of this rank.
        sample_ids: (n_local,) their indices; over the ranks each of 0 .. n - 1 exactly once.
        num_samples: n.
        num_prototypes: K of each granularity.
        temperature: mean of the concentrations.
        alpha: smooths the concentrations of small clusters.
        init: (K, D) means to start from, of each granularity.
        **kmeans_options: as :func:`multi_granularity_kmeans` takes them.

    Raises:
        ValueError: features are not finite, or there are fewer samples than prototypes.
        RankError: another rank failed.

    Source:
        Li et al., ICLR 2021, arXiv 2005.04966.
    """
    shared = distributed.world_size() > 1
    with propagate_rank_errors(features.device):
        clusterings = multi_granularity_kmeans(
            features,
            num_prototypes,
            init=init,
            sharded=shared,
            row_ids=sample_ids,
            **kmeans_options,
        )
        return [
            _granularity(found, sample_ids, num_samples, temperature, alpha)
            for found in clusterings
        ]


def _granularity(
    found: Clustering, sample_ids: Tensor, num_samples: int, temperature: float, alpha: float
) -> Granularity:
    means, size = found.means, len(found.means)
    # Every sample is on one rank: the others add zeros, which is exact.
    assignments = found.assignments.new_zeros(num_samples)
    assignments[sample_ids] = found.assignments
    assignments = _of_all(assignments, distributed.sum_over_ranks)
    sizes = torch.bincount(assignments, minlength=size)
    # Sums that do not depend on which rank adds what.
    distances = found.distances
    largest = distances.amax() if len(distances) else distances.new_zeros(())
    scale = exact_scale(float(_of_all(largest, distributed.max_over_ranks)), num_samples)
    sums = torch.zeros(size, dtype=torch.float64, device=means.device)
    sums.index_add_(0, found.assignments, on_grid(distances, scale))
    sums = _of_all(sums, distributed.sum_over_ranks) / scale
    return Granularity(
        means,
        F.normalize(means, dim=1),
        concentration_of_sums(sums, sizes, temperature, alpha).to(distances.dtype),
        assignments,
        found.objective,
        int((sizes == 0).sum()),
        int((sizes == 1).sum()),
    )


def _of_all(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    rank_barrier(values.device)
    return reduce(values)
