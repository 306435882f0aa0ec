"""Projection heads of trained networks: what layers they have, told from their weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

Activation = Literal["relu", "gelu"]
_ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}
_KEY = re.compile(r"(\d+)\.(weight|bias|running_mean|running_var|num_batches_tracked)")
# Stand for the three widths of a head in the shapes of its pattern.
_INPUT, _HIDDEN, _OUTPUT = 2, 3, 5
_ROLES = {_INPUT: "input", _HIDDEN: "hidden", _OUTPUT: "output"}


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The layers of a head: linear, (batch norm,) activation, ..., linear(, batch norm).

    Attributes:
        linears: number of linear layers, 1 or more.
        hidden_dim: width of the hidden layers; of no meaning without any.
        out_dim: D of the embeddings.
        activation: behind every hidden layer.
        batch_norm: whether hidden layers are normalised.
        hidden_bias: whether the hidden linear layers have a bias.
        out_bias: whether the last one has.
        last_batch_norm: whether the output is normalised; ``plain``: without learnt scale.
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
    """Builds a head with fresh weights.

    Args:
        spec: its layers.
        in_dim: D of the features.
        batch_norm: whether hidden layers are normalised; ``None``: as ``spec`` says.

    Returns:
        (N, in_dim) -> (N, spec.out_dim), not L2-normalised.
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
    weights: Mapping[str, Tensor],
    in_dim: int,
    activation: Activation,
    *,
    prefix: str = "",
    prototypes: Mapping[str, int] | None = None,
) -> tuple[nn.Sequential, HeadSpec]:
    """Rebuilds a head from its weights.

    Args:
        weights: of an ``nn.Sequential`` by key, such as ``0.weight``, or of one linear layer.
        in_dim: D of the features that it takes.
        activation: weights do not tell it.
        prefix: of the keys in their file, for messages.
        prototypes: D of the prototypes behind the head, by their full key.

    Raises:
        ValueError: naming the keys that do not belong to such a head, or whose sizes disagree.
    """
    single = "weight" in weights
    given = {f"0.{k}": v for k, v in weights.items()} if single else dict(weights)

    def shown(key: str) -> str:
        return prefix + (key.removeprefix("0.") if single else key)

    strange = [k for k in given if not _KEY.fullmatch(k)]
    if strange:
        raise ValueError(f"unexpected: {', '.join(map(shown, strange[:3]))}")
    spec = _layers(given, activation)
    with torch.device("meta"):
        expected = build_head(spec, _INPUT).state_dict()
    faults = {
        "missing": [k for k in expected if k not in given],
        "unexpected": [k for k in given if k not in expected],
        "of another shape": [
            k for k, v in expected.items() if k in given and v.ndim != given[k].ndim
        ],
    }
    found = [f"{f}: {', '.join(map(shown, keys[:3]))}" for f, keys in faults.items() if keys]
    if found:
        raise ValueError("; ".join(found))
    sizes: dict[int, dict[str, int]] = {
        _INPUT: {"the backbone's features": in_dim},
        _HIDDEN: {},
        _OUTPUT: dict(prototypes or {}),
    }
    for key, pattern in expected.items():
        for role, size in zip(pattern.shape, given[key].shape, strict=True):
            held = sizes[role].setdefault(shown(key), size)
            if held != size:
                raise ValueError(f"of another shape: {shown(key)} {tuple(given[key].shape)}")
    hidden = _agreed(_HIDDEN, sizes[_HIDDEN]) if sizes[_HIDDEN] else 0
    _agreed(_INPUT, sizes[_INPUT])
    spec = replace(spec, hidden_dim=hidden, out_dim=_agreed(_OUTPUT, sizes[_OUTPUT]))
    # Loading must not change the draws of what is built next.
    with torch.random.fork_rng(devices=[]):
        head = build_head(spec, in_dim)
    head.load_state_dict(given)
    return head, spec


def _layers(given: Mapping[str, Tensor], activation: Activation) -> HeadSpec:
    """What a head with these keys would be; its widths are those of the pattern."""
    places: dict[str, set[int]] = {}
    for key, value in given.items():
        place, _, field = key.partition(".")
        kind = "linear" if field == "weight" and value.ndim == 2 else field
        places.setdefault(kind, set()).add(int(place))
    biases = places.get("bias", set())
    norms = places.get("running_mean", set()) | places.get("running_var", set())
    affine = places.get("weight", set())
    # A bias by itself has lost its linear layer, which is then named as missing.
    linears = sorted(places.get("linear", set()) | (biases - affine - norms))
    if not linears:
        raise ValueError(f"no linear layer among {', '.join(list(given)[:3]) or 'no keys'}")
    last = linears[-1]
    return HeadSpec(
        linears=len(linears),
        hidden_dim=_HIDDEN,
        out_dim=_OUTPUT,
        activation=activation,
        batch_norm=any(n < last for n in norms),
        hidden_bias=any(n in biases for n in linears[:-1]),
        out_bias=last in biases,
        last_batch_norm=(
            "none"
            if not any(n > last for n in norms)
            else "affine"
            if any(n > last for n in affine)
            else "plain"
        ),
    )


def _agreed(role: int, sizes: Mapping[str, int]) -> int:
    """The size that all keys give."""
    (size, votes), *others = Counter(sizes.values()).most_common()
    if not others:
        return size
    # Without a majority any of the keys may be the wrong one.
    known = 2 * votes > len(sizes)
    odd = ", ".join(f"{k} {s}" for k, s in sizes.items() if not known or s != size)
    elsewhere = f", {size} elsewhere" if known else ""
    raise ValueError(f"of another shape: {_ROLES[role]} size of the head is {odd}{elsewhere}")
