"""Projection heads of trained networks; their layers are inferred from their weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from solo_ext.pretrained.files import misfits

Activation = Literal["relu", "gelu"]
_ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}
_KEY = re.compile(r"(\d+)\.(weight|bias|running_mean|running_var|num_batches_tracked)")


def load_head(
    weights: Mapping[str, Tensor], in_dim: int, activation: Activation, prefix: str = ""
) -> nn.Sequential:
    """Rebuilds a head of linear layers, batch norms and activations from its weights.

    Args:
        weights: of an ``nn.Sequential`` by key, such as ``0.weight``, or of one linear layer. A
            place without weights between two layers is an activation.
        in_dim: D of the features that it takes.
        activation: of the hidden layers; weights do not show it.
        prefix: prefix of the keys in their file, for messages.

    Returns:
        (N, in_dim) -> (N, embed_dim), not L2-normalised.

    Raises:
        ValueError: names the first keys that do not belong to such a head, or whose shapes
            contradict the others.

    >>> head = load_head({"0.weight": torch.ones(6, 12), "2.weight": torch.ones(4, 6)}, 12, "relu")
    >>> head
    Sequential(
      (0): Linear(in_features=12, out_features=6, bias=False)
      (1): ReLU()
      (2): Linear(in_features=6, out_features=4, bias=False)
    )
    """
    single = "weight" in weights
    held = {f"0.{k}": v for k, v in weights.items()} if single else weights
    strange = [k for k in held if not _KEY.fullmatch(k)]
    if strange:
        raise ValueError(f"unexpected: {', '.join(prefix + k for k in strange[:3])}")
    # Build on the meta device first: widths from a damaged file may need any amount of memory.
    with torch.device("meta"):
        pattern = _layers(held, in_dim, activation)
    faults = misfits(pattern[0] if single else pattern, weights, prefix)
    if faults:
        raise ValueError(faults)
    # Loading must not change later random draws.
    with torch.random.fork_rng(devices=[]):
        head = _layers(held, in_dim, activation)
    head.load_state_dict(held)
    return head


def _layers(weights: Mapping[str, Tensor], width: int, activation: Activation) -> nn.Sequential:
    """Layers up to the first two places without weights; the weights need not fit."""
    last = max(int(key.partition(".")[0]) for key in weights)
    kind = _ACTIVATIONS[activation]
    parts: list[nn.Module] = []
    for place in itertools.count():
        fields = {k.partition(".")[2]: v for k, v in weights.items() if k.startswith(f"{place}.")}
        if not fields:
            if place > last or not parts or isinstance(parts[-1], kind):
                break
            parts.append(kind())
        elif fields.keys() <= {"weight", "bias"}:
            rows = next(fields[name] for name in ("weight", "bias") if name in fields)
            out = rows.shape[0] if rows.ndim else 0
            parts.append(nn.Linear(width, out, bias="bias" in fields))
            width = out
        else:
            parts.append(nn.BatchNorm1d(width, affine=bool({"weight", "bias"} & fields.keys())))
    return nn.Sequential(*parts)


def build_head(like: nn.Sequential, in_dim: int, batch_norm: bool | None = None) -> nn.Sequential:
    """Builds a head with the layers of another one, and fresh weights.

    Args:
        like: as :func:`load_head` returns it.
        in_dim: D of the features.
        batch_norm: whether hidden layers are normalised; ``None``: as in ``like``.

    >>> teacher = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 8))
    >>> build_head(teacher, 12, batch_norm=True)(torch.randn(4, 12)).shape
    torch.Size([4, 8])
    """
    parts: list[nn.Module] = []
    width, last = in_dim, [m for m in like if isinstance(m, nn.Linear)][-1]
    behind = False
    for module in like:
        if isinstance(module, nn.Linear):
            parts.append(nn.Linear(width, module.out_features, bias=module.bias is not None))
            width, behind = module.out_features, module is last
            if batch_norm and not behind:
                parts.append(nn.BatchNorm1d(width))
        elif not isinstance(module, nn.BatchNorm1d):
            parts.append(type(module)())
        elif behind or batch_norm is None:
            parts.append(nn.BatchNorm1d(width, affine=module.affine))
    return nn.Sequential(*parts)
