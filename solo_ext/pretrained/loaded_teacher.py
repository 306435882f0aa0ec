"""A trained network as a teacher, proved by a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core.errors import UserError
from solo_ext.pretrained.heads import Activation, HeadSpec, load_head


@dataclass(frozen=True)
class LoadedTeacher:
    """A teacher on the CPU, in eval mode.

    Attributes:
        backbone: (N, 3, H, W) -> (N, features_dim).
        head: (N, features_dim) -> (N, embed_dim), not L2-normalised; ``None`` where there is none.
        prototypes: (K, embed_dim) unit rows in fp32; ``None`` where there are none.
        features_dim: of the backbone's output.
        embed_dim: of the head's output, ``features_dim`` without a head.
        mean: per channel, of the images that it was trained with.
        std: per channel.
        input_size: side of the images in pixels.
        digest: first 16 hex digits of the file's SHA-256; of the weights' where there is no file.
        description: one line.
        head_spec: the head's layers, for a student's head like it.
    """

    backbone: nn.Module
    head: nn.Module | None
    prototypes: Tensor | None
    features_dim: int
    embed_dim: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_size: int
    digest: str
    description: str
    head_spec: HeadSpec | None


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Weights behind a backbone, as a file holds them.

    Attributes:
        head: weights of the head by key; empty where there is none.
        head_prefix: of these keys in the file.
        activation: of the head.
        prototypes: (K, D) of any length; ``None`` where there are none.
        prototypes_key: their key in the file.
    """

    head: Mapping[str, Tensor] = field(default_factory=dict)
    head_prefix: str = ""
    activation: Activation = "relu"
    prototypes: Tensor | None = None
    prototypes_key: str = ""


def assemble(
    backbone: nn.Module,
    projection: Projection,
    *,
    name: str,
    digest: str,
    mean: Sequence[float],
    std: Sequence[float],
    input_size: int,
    notes: Sequence[str] = (),
) -> LoadedTeacher:
    """Puts head and prototypes behind a backbone and proves them with a random image.

    Args:
        backbone: with its weights.
        projection: what comes behind it.
        name: what the teacher is and where it comes from.
        digest: of its weights.
        mean: per channel.
        std: per channel.
        input_size: side of the image.
        notes: to go into the description.

    Raises:
        UserError: the parts do not fit together, or give anything but finite vectors.
    """
    # With a generator of its own, for loading a teacher must not change a student's draws.
    image = torch.randn(1, 3, input_size, input_size, generator=torch.Generator().manual_seed(0))
    backbone.eval()
    feats = _vectors(backbone, image, f"the backbone of {name}")
    features_dim = embed_dim = feats.shape[1]
    head: nn.Module | None = None
    spec: HeadSpec | None = None
    prototypes = projection.prototypes
    if prototypes is not None and prototypes.ndim != 2:
        raise UserError(f"{name}: of another shape: {projection.prototypes_key}")
    if projection.head:
        rows = {} if prototypes is None else {projection.prototypes_key: prototypes.shape[1]}
        try:
            head, spec = load_head(
                projection.head,
                features_dim,
                projection.activation,
                prefix=projection.head_prefix,
                prototypes=rows,
            )
        except ValueError as error:
            raise UserError(f"the head of {name} does not fit ({error})") from None
        head.eval()
        embed_dim = _vectors(head, feats, f"the head of {name}").shape[1]
    if prototypes is not None:
        prototypes = _unit(prototypes, embed_dim, f"{projection.prototypes_key} of {name}")
    parts = [
        f"{name}: {features_dim} features",
        "no head" if spec is None else f"head {spec}",
        "no prototypes" if prototypes is None else f"{len(prototypes)} prototypes",
        *notes,
    ]
    return LoadedTeacher(
        backbone,
        head,
        prototypes,
        features_dim,
        embed_dim,
        tuple(float(v) for v in mean),
        tuple(float(v) for v in std),
        input_size,
        digest,
        ", ".join(parts),
        spec,
    )


def _vectors(network: nn.Module, x: Tensor, name: str) -> Tensor:
    """Output of a network for one sample, seen to be a finite vector."""
    size = "x".join(str(s) for s in x.shape[1:])
    try:
        with torch.no_grad():
            out = network(x)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name} does not take an input of {size}: {reason}") from error
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 1:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UserError(f"{name} gives {shape} for an input of {size}; a vector is needed")
    if not out.isfinite().all():
        raise UserError(f"{name} gives values that are not finite; is the file damaged?")
    return out


def _unit(rows: Tensor, dim: int, name: str) -> Tensor:
    rows = rows.detach().float()
    if rows.shape[1] != dim:
        raise UserError(f"{name} has rows of {rows.shape[1]}, not {dim}, the size of embeddings")
    lengths = rows.norm(dim=1)
    if not (lengths.isfinite() & (lengths > 0)).all():
        raise UserError(f"{name} has rows that are zero or not finite; is the file damaged?")
    return F.normalize(rows, dim=1)
