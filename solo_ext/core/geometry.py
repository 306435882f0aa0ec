"""How a batch of embeddings lies in its space."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def effective_rank(x: Tensor) -> Tensor:
    """Number of directions that embeddings use: exponential of the entropy of singular values.

    ``exp(-sum_k p_k log p_k)`` with ``p_k = sigma_k / sum_l sigma_l`` over the singular values of
    x (Eq. 1 of Garrido et al.; no epsilon is added, for ``0 log 0 = 0``). As there, x is not
    centred: a mean far from zero counts as a direction of its own. There is no gradient. The
    decomposition takes N D min(N, D) operations, and on a GPU the host waits for it.

    Args:
        x: (N, D), of any scale.

    Returns:
        Scalar in [1, min(N, D)], fp32 (fp64 for fp64 input): 1 for collapsed and for zero rows,
        D for an isotropic cloud of many; NaN where a value is not finite.

    Raises:
        ValueError: x is not (N, D).

    Source:
        Roy and Vetterli, EUSIPCO 2007; Garrido et al., ICML 2023, arXiv 2210.02885.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be (N, D), got {tuple(x.shape)}")
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    finite = x.isfinite().all()
    # A diverged run is to be seen in the log, and not to end in an error of the decomposition.
    values = torch.linalg.svdvals(torch.where(finite, x, 0))
    share = values / values.sum().clamp(min=torch.finfo(x.dtype).tiny)
    rank = torch.special.entr(share).sum().exp()
    return torch.where(finite, rank, float("nan"))


@torch.no_grad()
def spread(x: Tensor) -> Tensor:
    """How far unit embeddings spread over the sphere: 0 for constant ones, 1 for isotropic ones.

    ``sqrt(D) / D * sum_d std_d(x / |x|)``, the standard deviation over the batch (population).
    Section 4.1 of Chen and He, who show its value without ``sqrt(D)``. There is no gradient, and
    the host waits for nothing.

    Args:
        x: (N, D), of any scale.

    Returns:
        Scalar in [0, 1], fp32 (fp64 for fp64 input); NaN for fewer than two rows, and where a
        value is not finite.

    Raises:
        ValueError: x is not (N, D).

    Source:
        Chen and He, CVPR 2021, arXiv 2011.10566.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be (N, D), got {tuple(x.shape)}")
    if len(x) < 2:
        return x.new_full((), math.nan, dtype=torch.float32)
    unit = F.normalize(x.to(torch.float64 if x.dtype == torch.float64 else torch.float32), dim=1)
    return unit.std(0, correction=0).mean() * math.sqrt(x.shape[1])
