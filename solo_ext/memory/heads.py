"""Projection heads."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


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
