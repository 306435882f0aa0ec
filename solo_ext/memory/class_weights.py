"""The head of the margin losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core.precision import full_precision, full_precision_products


class ClassWeights(nn.Module):
    """Cosines of features with one learned direction per class.

    Attributes:
        weight: (C, D), any scale; normalised when it is used.

    Args:
        num_classes: C, at least 1.
        dim: D, at least 1.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        if num_classes < 1 or dim < 1:
            raise ValueError(f"num_classes={num_classes}, dim={dim}: must be at least 1")
        self.weight = nn.Parameter(torch.empty(num_classes, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws directions evenly over the sphere, of about unit length."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Compares every row with every class.

        Args:
            x: (N, D); normalised inside.

        Returns:
            (N, C) cosines, which rounding may put slightly beyond 1, in fp32 under autocast too
            (fp64 for fp64 features).
        """
        x, weight = full_precision(x, self.weight)
        with full_precision_products(x.device):
            return F.normalize(x, dim=1) @ F.normalize(weight, dim=1).T

    @torch.no_grad()
    def rematch_(self, match: Tensor, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Gives every class the weights of the class it continues.

        Where clusters serve as classes, their numbers change with every clustering.

        Args:
            match: (C,) integers, a permutation: for each new class the old one, as
                ``solo_ext.clustering.matching.match_clusters`` gives.
            optimizer_state: what ``optimizer.state[weight]`` holds; its (C, D) tensors, running
                means of the gradients, move along.

        Raises:
            ValueError: ``match`` is not a permutation of the classes.
        """
        classes = torch.arange(self.weight.shape[0], device=match.device)
        if match.shape != classes.shape or not torch.equal(match.sort().values, classes):
            raise ValueError(
                f"match={match.tolist()}: must hold each of 0 to {len(classes) - 1} once"
            )
        held = [self.weight, *(optimizer_state or {}).values()]
        for values in held:
            if isinstance(values, Tensor) and values.shape == self.weight.shape:
                values.copy_(values[match.to(values.device)])
