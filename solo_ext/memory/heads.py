"""Heads: projector, class weights, bilinear critic."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core.precision import full_precision, full_precision_products


def projector(
    in_dim: int,
    hidden_dim: int,
    out_dim: int,
    *,
    batch_norm: bool = True,
    layers: int = 2,
    last_batch_norm: bool = False,
) -> nn.Module:
    """MLP: linear layers with batch norm and ReLU between them.

    Args:
        in_dim: D of the features.
        hidden_dim: width of the hidden layers; 0 is a single linear layer.
        out_dim: D of the embeddings.
        batch_norm: whether hidden layers are normalised.
        layers: number of linear layers.
        last_batch_norm: whether the last layer is normalised.

    Example:
        >>> projector(512, 2048, 128)(torch.randn(4, 512)).shape
        torch.Size([4, 128])
    """
    widths = [in_dim, *[hidden_dim] * (layers - 1), out_dim] if hidden_dim else [in_dim, out_dim]
    parts: list[nn.Module] = []
    for number, (width, following) in enumerate(pairwise(widths), start=1):
        last = number == len(widths) - 1
        normalised = last_batch_norm if last else batch_norm
        parts.append(nn.Linear(width, following, bias=not normalised))
        if normalised:
            parts.append(nn.BatchNorm1d(following))
        if not last:
            parts.append(nn.ReLU())
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


class ClassWeights(nn.Module):
    """Cosines of features with one learned direction per class.

    Attributes:
        weight: (C, D), any scale; :meth:`forward` normalises it.

    Args:
        num_classes: C, at least 1.
        dim: D, at least 1.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> ClassWeights(10, dim=4)(torch.randn(3, 4)).shape
        torch.Size([3, 10])
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
            (N, C) cosines, which rounding may put slightly beyond 1; in fp32 also under autocast
            (fp64 for fp64 features).
        """
        x, weight = full_precision(x, self.weight)
        with full_precision_products(x.device):
            return F.normalize(x, dim=1) @ F.normalize(weight, dim=1).T

    @torch.no_grad()
    def rematch_(self, match: Tensor, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Gives every class the weights of the old class that it continues.

        If clusters serve as classes, their numbers change with every clustering.

        Args:
            match: (C,) integers, a permutation: the old class of each new one, as
                ``solo_ext.clustering.agreement.match_clusters`` gives.
            optimizer_state: ``optimizer.state[weight]``; its (C, D) tensors, running means of the
                gradients, are permuted as well.

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

    Example:
        >>> BilinearCritic(4, 6)(torch.randn(3, 4), torch.randn(5, 6)).shape
        torch.Size([3, 5])

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
            (N, K), in fp32 also under autocast (fp64 for fp64 queries).
        """
        z, c, weight = full_precision(z, c, self.weight)
        with full_precision_products(z.device):
            return z @ weight @ c.T
