"""How a batch of embeddings lies in its space."""

from __future__ import annotations

import torch
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
