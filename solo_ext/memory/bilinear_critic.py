"""The bilinear critic of CPC."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from solo_ext.core.precision import full_precision, full_precision_products


class BilinearCritic(nn.Module):
    """Scores ``z^T W c`` of queries with contexts, the logarithm of f in Eq. 3.

    Attributes:
        weight: (D1, D2) W, for ``bilinear_info_nce_loss_func``; drawn so that the scores of rows
            of unit variance have unit variance.

    Args:
        query_dim: D1, at least 1.
        context_dim: D2, at least 1.

    Raises:
        ValueError: a size is below 1.

    Source:
        van den Oord et al., 2018, arXiv 1807.03748.
    """

    def __init__(self, query_dim: int, context_dim: int) -> None:
        super().__init__()
        if query_dim < 1 or context_dim < 1:
            raise ValueError(
                f"query_dim={query_dim}, context_dim={context_dim}: must be at least 1"
            )
        self.weight = nn.Parameter(torch.empty(query_dim, context_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew."""
        nn.init.normal_(self.weight, std=self.weight.numel() ** -0.5)

    def forward(self, z: Tensor, c: Tensor) -> Tensor:
        """Scores every query with every context.

        Args:
            z: (N, D1), any scale.
            c: (K, D2), any scale.

        Returns:
            (N, K), in fp32 under autocast too (fp64 for fp64 queries).
        """
        z, c, weight = full_precision(z, c, self.weight)
        with full_precision_products(z.device):
            return z @ weight @ c.T
