"""Balanced assignments of a batch to prototypes."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.core.precision import full_precision_products
from solo_ext.kernels.sinkhorn import probabilities_, scale


@torch.no_grad()
def sinkhorn(
    scores: Tensor, epsilon: float = 0.05, iterations: int = 3, *, unit: bool = False
) -> Tensor:
    """Assignments that give all prototypes nearly the same mass, by Sinkhorn-Knopp.

    ``Q = diag(u) exp(scores / epsilon) diag(v)`` (Eq. 5). Starting from u = 1, each
    iteration chooses v so that every prototype has mass N / K over the batch, and then u so that
    every sample has mass 1: rows sum to 1, columns nearly to N / K. The batch is that of all
    ranks, which may hold different numbers of samples. Safe at any scores and epsilon; the
    result is a constant.

    Args:
        scores: (N, K) local samples by prototypes, higher is closer; fp64 is kept, all else is
            computed and returned in fp32.
        epsilon: above 0; the lower, the closer to one prototype for each sample.
        iterations: 1 or more.
        unit: whether all scores are known to lie in [-1, 1], as cosines do; saves a pass over them
            unless epsilon is below 0.025.

    Returns:
        (N, K) probabilities.

    Raises:
        ValueError: an argument is out of its range.

    Source:
        Caron et al., NeurIPS 2020, arXiv 2006.09882; Cuturi, NeurIPS 2013, arXiv 1306.0895.
    """
    if scores.ndim != 2:
        raise ValueError(f"scores must be (N, K), got {tuple(scores.shape)}")
    if epsilon <= 0:
        raise ValueError(f"epsilon={epsilon}: must be above 0; SwAV uses 0.05")
    if iterations < 1:
        raise ValueError(f"iterations={iterations}: must be 1 or more; SwAV uses 3")
    dtype = torch.promote_types(scores.dtype, torch.float32)

    def logits(rows: slice, columns: slice) -> Tensor:
        return scores[rows, columns].to(dtype) * (1 / epsilon)

    with full_precision_products(scores.device):
        shape = scores.shape[0], scores.shape[1]
        bound = 1 / epsilon if unit else None
        like = scores.new_empty(0, dtype=dtype)
        return probabilities_(*scale(logits, shape, like, iterations, bound=bound))
