"""Networks, SGD and moving averages written out, on a flat table of named tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

State = dict[str, Tensor]
EPS, STATISTICS_MOMENTUM = 1e-5, 0.1
"""Of batch norm, as every library has them."""
PIXELS = 16
"""Of a side of what the backbone's first linear layer sees."""
BACKBONE = ["enlarge", "flatten", "linear", "norm", "tanh", "linear"]
"""A small MLP."""


def head(layers: int, norm: bool, last_norm: bool = False) -> list[str]:
    """Linear layers with batch norm and ReLU between them."""
    hidden = ["linear", "norm", "relu"] if norm else ["linear", "relu"]
    return hidden * (layers - 1) + (["linear", "norm"] if last_norm else ["linear"])


def forward(w: State, name: str, layers: Sequence[str], x: Tensor, train: bool = True) -> Tensor:
    """The layers of a network in turn; those without weights count in the names too."""
    for number, layer in enumerate(layers):
        at = f"{name}.{number}."
        if layer == "enlarge":
            times = PIXELS // x.shape[-1]
            x = x.repeat_interleave(times, dim=2).repeat_interleave(times, dim=3)
        elif layer == "flatten":
            x = x.reshape(len(x), -1)
        elif layer == "linear":
            x = x @ w[f"{at}weight"].T
            # Batch norm would take a bias away again: some layers before it have none.
            x = x + w[f"{at}bias"] if f"{at}bias" in w else x
        elif layer == "norm":
            x = _normalised(w, at, x, train)
        elif layer == "relu":
            x = torch.where(x > 0, x, torch.zeros_like(x))
        elif layer == "tanh":
            x = 1 - 2 / (torch.exp(2 * x) + 1)
    return x


def _normalised(w: State, at: str, x: Tensor, train: bool) -> Tensor:
    mean, variance = w[f"{at}running_mean"], w[f"{at}running_var"]
    if train:
        n = len(x)
        mean = x.sum(0) / n
        variance = ((x - mean) ** 2).sum(0) / n
        now = {"running_mean": mean.detach(), "running_var": variance.detach() * n / (n - 1)}
        for kind, value in now.items():
            kept = (1 - STATISTICS_MOMENTUM) * w[at + kind]
            w[at + kind] = kept + STATISTICS_MOMENTUM * value
        w[f"{at}num_batches_tracked"] = w[f"{at}num_batches_tracked"] + 1
    return (x - mean) / (variance + EPS).sqrt() * w[f"{at}weight"] + w[f"{at}bias"]


def weights_of(w: State, networks: Iterable[str]) -> list[str]:
    """The names of what a gradient moves."""
    tables = ("running_mean", "running_var", "num_batches_tracked")
    of = tuple(f"{network}." for network in networks)
    return [name for name in w if name.startswith(of) and not name.endswith(tables)]


def sgd_step(
    w: State,
    velocity: State,
    gradients: State,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """``v <- momentum v + gradient + weight_decay w``, ``w <- w - lr v``."""
    for name, gradient in gradients.items():
        push = gradient + weight_decay * w[name]
        velocity[name] = momentum * velocity[name] + push if name in velocity else push
        w[name] = w[name] - lr * velocity[name]


def tau_after(step: int, steps: int, base: float, final: float) -> float:
    """Share that a momentum network keeps of itself, along half a cosine (BYOL)."""
    return final - (final - base) * (math.cos(math.pi * step / steps) + 1) / 2


def follow(w: State, networks: Iterable[str], tau: float) -> None:
    """``momentum <- tau momentum + (1 - tau) online``, of weights and not of statistics."""
    for name in weights_of(w, networks):
        own = f"momentum_{name}"
        w[own] = tau * w[own] + (1 - tau) * w[name]


def written(table: Tensor, place: int, rows: Iterable[Tensor]) -> tuple[Tensor, int]:
    """A ring with rows written from a place on, and the place that follows them."""
    table = table.clone()
    for row in rows:
        table[place] = row
        place = (place + 1) % len(table)
    return table, place
