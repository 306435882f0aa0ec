"""Projection heads."""

from __future__ import annotations

from torch import nn


def projector(in_dim: int, hidden_dim: int, out_dim: int, *, batch_norm: bool = True) -> nn.Module:
    """Two-layer MLP: linear, batch norm, ReLU, linear.

    Args:
        in_dim: D of the features.
        hidden_dim: width of the hidden layer; 0 is a single linear layer.
        out_dim: D of the embeddings.
        batch_norm: whether the hidden layer is normalised.
    """
    if not hidden_dim:
        return nn.Linear(in_dim, out_dim)
    layers: list[nn.Module] = [nn.Linear(in_dim, hidden_dim, bias=not batch_norm)]
    if batch_norm:
        layers.append(nn.BatchNorm1d(hidden_dim))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(hidden_dim, out_dim))
