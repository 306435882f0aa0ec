"""The E-step of PCL (Algorithm 1): k-means at every granularity, and the concentrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solo_ext.clustering.k_means import multi_granularity_kmeans
from solo_ext.core.distributed import world_size

_FLOOR = 1 / 100


class Granularity(NamedTuple):
    """The clustering of a whole data set into K clusters.

    Attributes:
        means: (K, D) means from k-means; the prototypes are the normalised means.
        concentration: (K,), whose mean is the temperature.
        assignments: (n_local,) cluster of every sample of this rank, int32.
        objective: mean squared distance of the samples to their means.
        sizes: (K,) number of samples in each cluster.

    Example:
        >>> (found,) = e_step(torch.eye(4), torch.arange(4), [4], temperature=0.2)
        >>> found.means.shape, found.assignments.sort().values.tolist()
        (torch.Size([4, 4]), [0, 1, 2, 3])
    """

    means: Tensor
    concentration: Tensor
    assignments: Tensor
    objective: float
    sizes: Tensor


@torch.no_grad()
def e_step(
    features: Tensor,
    sample_ids: Tensor,
    num_prototypes: Sequence[int],
    *,
    temperature: float,
    alpha: float = 10.0,
    device: torch.device | None = None,
    **kmeans_options: Any,
) -> list[Granularity]:
    """Clusters a data set at several granularities and measures each cluster's concentration.

    The features are unit rows, k-means is Euclidean, and the concentrations use the distances to
    the unnormalised means (Algorithm 1).

    Args:
        features: (n_local, D) unit features of the samples of this rank.
        sample_ids: (n_local,) indices of these samples; all ranks together hold each index from 0
            to the number of samples - 1 exactly once.
        num_prototypes: K of each granularity.
        temperature: mean of the concentrations.
        alpha: smooths the concentrations of small clusters.
        device: the device that computes, if the features are on another one or in a file.
        **kmeans_options: options of :func:`multi_granularity_kmeans`, such as ``init``.

    Raises:
        ValueError: features are not finite, or there are fewer samples than prototypes.
        RankError: another rank failed.

    Example:
        >>> x = torch.nn.functional.normalize(torch.randn(100, 8), dim=1)
        >>> coarse, fine = e_step(x, torch.arange(100), [4, 20], temperature=0.2)
        >>> fine.means.shape, fine.concentration.shape, fine.assignments.shape
        (torch.Size([20, 8]), torch.Size([20]), torch.Size([100]))

    Source:
        Li et al., ICLR 2021, arXiv 2005.04966.
    """
    shares: dict[str, Any] = {"row_ids": sample_ids, "sharded": world_size() > 1, "device": device}
    found = []
    for c in multi_granularity_kmeans(features, num_prototypes, **shares | kmeans_options):
        phi = _concentration(c.distance_sums, c.sizes, temperature, alpha).to(c.means.dtype)
        found.append(Granularity(c.means, phi, c.assignments.int(), c.objective, c.sizes))
    return found


@torch.no_grad()
def cluster_concentration(
    distances: Tensor,
    assignments: Tensor,
    num_clusters: int,
    temperature: float,
    alpha: float = 10.0,
) -> Tensor:
    """Concentration phi of every cluster; loose and small clusters have large values.

    ``raw_c = (sum_{i in c} d_i / n_c) / ln(n_c + alpha)`` (Eq. 12) for clusters of two rows or
    more; the others get the largest raw value. All values are clipped to their 10th and 90th
    percentile (linear interpolation) and multiplied by ``temperature / mean``. The loss divides by
    the values, and a cluster of copies of one image would have 0: the floor is temperature / 100.
    Due to the floor, the mean can be up to 1 % above the temperature. If no cluster has a spread
    (all have one row, or the clipped mean is 0), every value is the temperature.

    Args:
        distances: (n,) Euclidean distances of the rows to their means, >= 0; not squared.
        assignments: (n,) integers in [0, num_clusters).
        num_clusters: K, >= 1; includes empty clusters.
        temperature: mean of the result, > 0.
        alpha: smoothing for small clusters, >= 0.

    Returns:
        (K,) in the dtype of ``distances``, computed in fp64.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.

    Example:
        >>> tight, loose = torch.full((50,), 0.1), torch.full((50,), 0.3)
        >>> clusters = torch.arange(100) // 50
        >>> cluster_concentration(torch.cat((tight, loose)), clusters, 2, temperature=0.2)
        tensor([0.1200, 0.2800])

    Source:
        Li et al., ICLR 2021, arXiv 2005.04966, section 3.3; clipping and the rule for small
        clusters as in the authors' code.
    """
    if distances.ndim != 1 or distances.shape != assignments.shape:
        raise ValueError(
            f"distances and assignments have the shapes {tuple(distances.shape)} and "
            f"{tuple(assignments.shape)}; pass one of each per row, (n,)"
        )
    if num_clusters < 1 or not temperature > 0 or not alpha >= 0:
        raise ValueError(
            f"num_clusters={num_clusters}, temperature={temperature}, alpha={alpha}: must be at "
            "least 1, above 0 and at least 0"
        )
    sizes = torch.bincount(assignments, minlength=num_clusters)
    sums = torch.zeros(num_clusters, dtype=torch.float64, device=distances.device)
    sums.index_add_(0, assignments, distances.double())
    return _concentration(sums, sizes, temperature, alpha).to(distances.dtype)


def _concentration(sums: Tensor, sizes: Tensor, temperature: float, alpha: float) -> Tensor:
    """phi (K,) in fp64, from each cluster's sum of distances (K,), fp64, and its size (K,)."""
    several = sizes >= 2
    raw = sums / sizes.clamp_min(1) / (sizes.clamp_min(2).double() + alpha).log()
    raw = raw.masked_fill(~several, 0.0)
    raw = torch.where(several, raw, raw.max())
    low, high = raw.quantile(raw.new_tensor([0.1, 0.9]))
    clipped = raw.clamp(low, high)
    mean = clipped.mean()
    phi = (temperature * clipped / mean).clamp_min(_FLOOR * temperature)
    return torch.where(mean > 0, phi, temperature)
