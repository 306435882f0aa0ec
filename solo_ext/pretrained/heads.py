"""Projection heads of trained networks; their layers are inferred from their weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from solo_ext.pretrained.files import misfits

Activation = Literal["relu", "gelu"]
_ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}
_KEY = re.compile(r"(\d+)\.(weight|bias|running_mean|running_var|num_batches_tracked)")


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The layers of a head: linear, (batch norm,) activation, ..., linear(, batch norm).

    Attributes:
        linears: number of linear layers, 1 or more.
        hidden_dim: width of the hidden layers; 0 without any.
        out_dim: D of the embeddings.
        activation: after every hidden layer.
        batch_norm: whether hidden layers are normalised.
        hidden_bias: whether the hidden linear layers have a bias.
        out_bias: whether the last linear layer has a bias.
        last_batch_norm: whether the output is normalised; ``plain``: without learnt scale.

    >>> str(HeadSpec(linears=2, hidden_dim=2048, out_dim=128, activation="relu"))
    '2048-128 relu'
    """

    linears: int
    hidden_dim: int
    out_dim: int
    activation: Activation
    batch_norm: bool = False
    hidden_bias: bool = True
    out_bias: bool = True
    last_batch_norm: Literal["none", "affine", "plain"] = "none"

    def __str__(self) -> str:
        widths = "-".join(map(str, [self.hidden_dim] * (self.linears - 1) + [self.out_dim]))
        normalised = " with batch norm" if self.batch_norm else ""
        return f"{widths} {self.activation}{normalised}" if self.linears > 1 else widths


def build_head(spec: HeadSpec, in_dim: int, batch_norm: bool | None = None) -> nn.Sequential:
    """Builds a head (N, in_dim) -> (N, spec.out_dim) with fresh weights.

    ``batch_norm`` overrides that of ``spec``.

    >>> spec = HeadSpec(linears=2, hidden_dim=16, out_dim=8, activation="gelu")
    >>> build_head(spec, 12)(torch.randn(4, 12)).shape
    torch.Size([4, 8])
    """
    normalised = spec.batch_norm if batch_norm is None else batch_norm
    parts: list[nn.Module] = []
    width = in_dim
    for _ in range(spec.linears - 1):
        parts.append(nn.Linear(width, spec.hidden_dim, bias=spec.hidden_bias))
        if normalised:
            parts.append(nn.BatchNorm1d(spec.hidden_dim))
        parts.append(_ACTIVATIONS[spec.activation]())
        width = spec.hidden_dim
    parts.append(nn.Linear(width, spec.out_dim, bias=spec.out_bias))
    if spec.last_batch_norm != "none":
        parts.append(nn.BatchNorm1d(spec.out_dim, affine=spec.last_batch_norm == "affine"))
    return nn.Sequential(*parts)


def load_head(
    weights: Mapping[str, Tensor], in_dim: int, activation: Activation, prefix: str = ""
) -> tuple[nn.Sequential, HeadSpec]:
    """Rebuilds a head from its weights.

    Args:
        weights: of an ``nn.Sequential`` by key, such as ``0.weight``, or of one linear layer.
        in_dim: D of the features that it takes.
        activation: of the hidden layers; weights do not show it.
        prefix: prefix of the keys in their file, for messages.

    Raises:
        ValueError: names the first keys that do not belong to such a head, or whose shapes
            contradict the others.

    >>> head, spec = load_head({"0.weight": torch.ones(8, 12)}, 12, "relu")
    >>> head(torch.randn(4, 12)).shape, spec.out_bias
    (torch.Size([4, 8]), False)
    """
    single = "weight" in weights
    strange = [k for k in weights if not _KEY.fullmatch(f"0.{k}" if single else k)]
    if strange:
        raise ValueError(f"unexpected: {', '.join(prefix + k for k in strange[:3])}")
    spec = _spec({f"0.{k}": v for k, v in weights.items()} if single else weights, activation)
    # Build on the meta device first: widths from a damaged file may need any amount of memory.
    with torch.device("meta"):
        pattern = build_head(spec, in_dim)
    faults = misfits(pattern[0] if single else pattern, weights, prefix)
    if faults:
        raise ValueError(faults)
    # Loading must not change later random draws.
    with torch.random.fork_rng(devices=[]):
        head = build_head(spec, in_dim)
    (head[0] if single else head).load_state_dict(weights)
    return head, spec


def _spec(weights: Mapping[str, Tensor], activation: Activation) -> HeadSpec:
    """The head with a linear layer for every matrix, and batch norms for running statistics.

    Weights of another kind of network give some head that they do not fit.
    """
    keys = [key.split(".") for key in weights]
    places = {name: {int(n) for n, field in keys if field == name} for name in ("weight", "bias")}
    norms = {int(n) for n, field in keys if field.startswith("running")}
    matrices = {n for n in places["weight"] - norms if weights[f"{n}.weight"].ndim == 2}
    # A bias without its matrix counts as a linear layer, so that the matrix is named as missing.
    linears = sorted(matrices | (places["bias"] - places["weight"] - norms))
    if not linears:
        raise ValueError(f"no linear layer among {', '.join(list(weights)[:3]) or 'no keys'}")

    def width(place: int) -> int:
        matrix = weights.get(f"{place}.weight")
        return weights[f"{place}.bias"].numel() if matrix is None else len(matrix)

    last = linears[-1]
    behind = {n for n in norms if n > last}
    return HeadSpec(
        linears=len(linears),
        hidden_dim=width(linears[0]) if len(linears) > 1 else 0,
        out_dim=width(last),
        activation=activation,
        batch_norm=any(n < last for n in norms),
        hidden_bias=any(n in places["bias"] for n in linears[:-1]),
        out_bias=last in places["bias"],
        last_batch_norm=(
            "none" if not behind else "affine" if behind & places["weight"] else "plain"
        ),
    )
