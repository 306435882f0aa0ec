"""How tight the clusters are: the temperatures of ProtoNCE."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOOR = 1 / 100


@torch.no_grad()
def cluster_concentration(
    distances: Tensor,
    assignments: Tensor,
    num_clusters: int,
    temperature: float,
    alpha: float = 10.0,
) -> Tensor:
    """Concentration phi of every cluster, the larger the looser and the smaller the cluster.

    ``raw_c = (sum_{i in c} d_i / n_c) / ln(n_c + alpha)`` for clusters of two rows or more; the
    others get the largest raw value. All are clipped to their own 10th and 90th percentile (linear
    interpolation) and multiplied by ``temperature / mean``. No value is below temperature / 100: a
    cluster of copies of one image would have 0, and the loss divides by it. Where the floor acts,
    the mean is up to 1 % above the temperature. Where there is no spread to go by (only clusters
    of one row, or a clipped mean of 0), every value is the temperature.

    Args:
        distances: (n,) Euclidean distances of the rows to their means, >= 0; not squared.
        assignments: (n,) integers in [0, num_clusters).
        num_clusters: K, >= 1; includes the empty ones.
        temperature: Mean of the result, > 0.
        alpha: Smoothing for small clusters, >= 0.

    Returns:
        (K,) in the dtype of ``distances``, computed in fp64.

    Raises:
        ValueError: Shapes, a cluster number or a setting as described are not.

    Source:
        Li et al., ICLR 2021, arXiv 2005.04966, section 3.3; clipping and the rule for small
        clusters as in the authors' code.
    """
    _check(distances, assignments, num_clusters, temperature, alpha)
    sizes = torch.bincount(assignments, minlength=num_clusters)
    sums = torch.zeros(num_clusters, dtype=torch.float64, device=distances.device)
    sums.index_add_(0, assignments, distances.double())
    return concentration_of_sums(sums, sizes, temperature, alpha).to(distances.dtype)


def concentration_of_sums(
    sums: Tensor, sizes: Tensor, temperature: float, alpha: float = 10.0
) -> Tensor:
    """What :func:`cluster_concentration` makes of the rows of each cluster.

    Args:
        sums: (K,) fp64 sums of the rows' distances.
        sizes: (K,) int64 numbers of rows.
        temperature: As there.
        alpha: As there.

    Returns:
        (K,) fp64.
    """
    several = sizes >= 2
    raw = sums / sizes.clamp_min(1) / (sizes.clamp_min(2).double() + alpha).log()
    raw = raw.masked_fill(~several, 0.0)
    raw = torch.where(several, raw, raw.max())
    low, high = raw.quantile(raw.new_tensor([0.1, 0.9]))
    clipped = raw.clamp(low, high)
    mean = clipped.mean()
    phi = (temperature * clipped / mean).clamp_min(_FLOOR * temperature)
    return torch.where(mean > 0, phi, temperature)


def _check(
    distances: Tensor, assignments: Tensor, num_clusters: int, temperature: float, alpha: float
) -> None:
    if distances.ndim != 1 or distances.shape != assignments.shape:
        raise ValueError(
            f"distances and assignments have the shapes {tuple(distances.shape)} and "
            f"{tuple(assignments.shape)}; pass one of each per row, (n,)"
        )
    if num_clusters < 1:
        raise ValueError(f"num_clusters={num_clusters}: must be at least 1")
    if len(assignments):
        low, high = int(assignments.min()), int(assignments.max())
        if low < 0 or high >= num_clusters:
            raise ValueError(
                f"assignments lie in [{low}, {high}]; they must lie in [0, {num_clusters - 1}], "
                "the numbers of the clusters"
            )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    if not alpha >= 0:
        raise ValueError(f"alpha={alpha}: must be at least 0")
