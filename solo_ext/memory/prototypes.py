"""Prototypes that learn."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Prototypes(nn.Module):
    """Learnable unit directions.

    Rows are brought back to unit length in place after each optimiser step, as SwAV does, and not
    by weight normalisation in the forward pass: the loss then reads the parameter itself, with
    neither a copy of it nor a second gradient of its size, and a row's step is not divided by a
    length that grows from step to step. Starts as random directions.

    Attributes:
        weight: (K, D).

    Args:
        num_prototypes: K, above 0.
        dim: D, above 0.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(self, num_prototypes: int, dim: int) -> None:
        super().__init__()
        if num_prototypes < 1 or dim < 1:
            raise ValueError(f"num_prototypes={num_prototypes}, dim={dim}: must be 1 or more")
        self.weight = nn.Parameter(torch.randn(num_prototypes, dim))
        self.normalize_()

    @classmethod
    def from_rows(cls, rows: Tensor) -> Self:
        """Prototypes that start in given directions, a teacher's for example.

        Args:
            rows: (K, D) of any length above 0; copied. Weight norm's ``weight_v`` serves as well
                as the product: the length ``weight_g`` falls away.

        Raises:
            ValueError: the shape is another.
        """
        if rows.ndim != 2:
            raise ValueError(f"rows must be (K, D), got {tuple(rows.shape)}")
        # On the meta device no random start is drawn, which would move the generator.
        with torch.device("meta"):
            made = cls(*rows.shape)
        made.weight = nn.Parameter(rows.detach().clone())
        made.normalize_()
        return made

    @torch.no_grad()
    def normalize_(self) -> None:
        """Brings the rows to unit length in place; to be called after each optimiser step."""
        length = torch.linalg.vector_norm(self.weight, dim=1, keepdim=True)
        self.weight.div_(length.clamp(min=torch.finfo(length.dtype).tiny))

    def forward(self, x: Tensor) -> Tensor:
        """Cosines with the prototypes.

        Args:
            x: (N, D) unit rows.

        Returns:
            (N, K).
        """
        return F.linear(x, self.weight)
