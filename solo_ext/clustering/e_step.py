"""The E-step of prototypical contrastive learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from solo_ext import distributed
from solo_ext.clustering.concentration import cluster_concentration
from solo_ext.clustering.multi_granularity import multi_granularity_kmeans


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
    features: Tensor,
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

    Source:
        Li et al., ICLR 2021, arXiv 2005.04966.
    """
    clusterings = multi_granularity_kmeans(
        features,
        num_prototypes,
        init=init,
        sharded=distributed.world_size() > 1,
        row_ids=sample_ids,
        **kmeans_options,
    )
    return [
        _granularity(
            found.means,
            _of_all(found.assignments, sample_ids, num_samples),
            _of_all(found.distances, sample_ids, num_samples),
            found.objective,
            temperature,
            alpha,
        )
        for found in clusterings
    ]


def _of_all(values: Tensor, sample_ids: Tensor, num_samples: int) -> Tensor:
    """(n,) values of all ranks, by sample index."""
    placed = values.new_zeros(num_samples)
    placed[sample_ids] = values
    if distributed.world_size() > 1:
        # Every sample is on one rank: the others add zeros, which is exact.
        dist.all_reduce(placed)
    return placed


def _granularity(
    means: Tensor,
    assignments: Tensor,
    distances: Tensor,
    objective: float,
    temperature: float,
    alpha: float,
) -> Granularity:
    size = means.shape[0]
    counts = torch.bincount(assignments, minlength=size)
    return Granularity(
        means,
        F.normalize(means, dim=1),
        cluster_concentration(distances, assignments, size, temperature, alpha),
        assignments,
        objective,
        int((counts == 0).sum()),
        int((counts == 1).sum()),
    )
