"""What a teacher is once loaded and tested, and the settings that say where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core.errors import UserError, first_line
from solo_ext.pretrained.heads import Activation, load_head

Layout = Literal["run", "moco_v2", "swav", "dino", "timm", "torchvision"]
KEY = "method_kwargs.teacher"
"""Config key of the teacher's settings."""


class TeacherSource(Protocol):
    """Where a teacher comes from: the part of ``TeacherKwargs`` of the methods that is read here.

    For official files ``model: None`` is the published architecture; otherwise a torchvision name,
    optionally followed by ``w2`` to ``w5`` for SwAV's wide ones, or a timm name.

    >>> from solo_ext.methods.distillation import TeacherKwargs
    >>> TeacherKwargs(layout="swav", path="swav_800ep_pretrain.pth.tar").networks
    'online'
    """

    layout: Layout
    path: str | None
    model: str | None
    model_kwargs: dict[str, Any]
    networks: Literal["online", "momentum"]


@dataclass(frozen=True)
class LoadedTeacher:
    """A teacher on the CPU, in eval mode.

    Attributes:
        backbone: (N, 3, H, W) -> (N, features_dim).
        head: (N, features_dim) -> (N, embed_dim), not L2-normalised; ``None`` if there is none.
        prototypes: (K, embed_dim) unit rows in fp32; ``None`` if there are none.
        features_dim: of the backbone's output.
        embed_dim: of the head's output, ``features_dim`` without a head.
        mean: per channel, of the images that it was trained with, as ``std``.
        input_size: side of the images in pixels.
        digest: first 16 hex digits of the file's SHA-256; of the weights' if there is no file.
        description: one line.

    >>> network = nn.Sequential(nn.Flatten(), nn.LazyLinear(16))
    >>> rest = {"name": "mine", "digest": "", "mean": [0.5] * 3, "std": [0.25] * 3}
    >>> teacher = assemble(network, **rest, input_size=8)
    >>> teacher.features_dim, teacher.head is None, teacher.embed_dim
    (16, True, 16)
    """

    backbone: nn.Module
    head: nn.Sequential | None
    prototypes: Tensor | None
    features_dim: int
    embed_dim: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_size: int
    digest: str
    description: str


def assemble(
    backbone: nn.Module,
    *,
    name: str,
    digest: str,
    mean: Sequence[float],
    std: Sequence[float],
    input_size: int,
    head: Mapping[str, Tensor] | None = None,
    head_prefix: str = "",
    activation: Activation = "relu",
    prototypes: Tensor | None = None,
    prototypes_key: str = "",
    notes: Sequence[str] = (),
) -> LoadedTeacher:
    """Adds head and prototypes to a backbone and tests them with a random image.

    Args:
        backbone: with its weights.
        name: what the teacher is and where it comes from.
        digest: as in :class:`LoadedTeacher`, with ``mean``, ``std`` and ``input_size``.
        head: weights of the head by key, if there is one.
        head_prefix: prefix of these keys in the file.
        activation: of the head.
        prototypes: (K, D) of any length above 0, if there are any.
        prototypes_key: their key in the file.
        notes: added to the description.

    Raises:
        UserError: the parts do not fit together, or the output is not finite vectors.

    >>> network = nn.Sequential(nn.Flatten(), nn.LazyLinear(16))
    >>> rest = {"name": "mine", "digest": "", "mean": [0.5] * 3, "std": [0.25] * 3}
    >>> head = {"weight": torch.ones(4, 16)}
    >>> assemble(network, **rest, input_size=8, head=head).description
    'mine: 16 features, head 4, no prototypes'
    """
    # A separate generator: loading a teacher must not change a student's draws.
    image = torch.randn(1, 3, input_size, input_size, generator=torch.Generator().manual_seed(0))
    backbone.eval()
    feats = _vectors(backbone, image, f"the backbone of {name}")
    features_dim = embed_dim = feats.shape[1]
    network, layers = None, "no head"
    if head:
        try:
            network = load_head(head, features_dim, activation, head_prefix).eval()
        except ValueError as error:
            raise UserError(
                f"the head of {name} does not fit {features_dim} features ({error})"
            ) from None
        embed_dim = _vectors(network, feats, f"the head of {name}").shape[1]
        widths = [str(m.out_features) for m in network if isinstance(m, nn.Linear)]
        layers = f"head {'-'.join(widths)}"
    if prototypes is not None:
        prototypes, key = prototypes.detach().float(), f"{prototypes_key} of {name}"
        if prototypes.ndim != 2 or prototypes.shape[1] != embed_dim:
            raise UserError(f"{key} has the shape {tuple(prototypes.shape)}, not (K, {embed_dim})")
        lengths = prototypes.norm(dim=1)
        if not (lengths.isfinite() & (lengths > 0)).all():
            raise UserError(f"{key} has rows that are zero or not finite; is the file damaged?")
        prototypes = F.normalize(prototypes, dim=1)
    parts = [
        f"{name}: {features_dim} features",
        layers,
        "no prototypes" if prototypes is None else f"{len(prototypes)} prototypes",
        *notes,
    ]
    return LoadedTeacher(
        backbone=backbone,
        head=network,
        prototypes=prototypes,
        features_dim=features_dim,
        embed_dim=embed_dim,
        mean=tuple(float(v) for v in mean),
        std=tuple(float(v) for v in std),
        input_size=input_size,
        digest=digest,
        description=", ".join(parts),
    )


def _vectors(network: nn.Module, x: Tensor, name: str) -> Tensor:
    """Output of a network for one sample, checked to be a finite vector."""
    size = "x".join(str(s) for s in x.shape[1:])
    try:
        with torch.no_grad():
            out = network(x)
    except Exception as error:
        raise UserError(f"{name} does not take an input of {size}: {first_line(error)}") from error
    if not isinstance(out, Tensor) or out.ndim != 2:
        raise UserError(f"{name} gives no vector for an input of {size}")
    if not out.isfinite().all():
        raise UserError(f"{name} gives values that are not finite; is the file damaged?")
    return out
