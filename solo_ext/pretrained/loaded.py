"""A loaded and tested teacher: a backbone, its head and its prototypes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core.errors import UserError, first_line
from solo_ext.pretrained.files import misfits, refuse_keys

KEY = "method_kwargs.teacher"
"""Config key of the teacher's settings."""
Activation = Literal["relu", "gelu"]
_ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}
_HEAD_KEY = re.compile(r"(\d+)\.(weight|bias|running_mean|running_var|num_batches_tracked)")
_PROTOTYPES = (
    ("weight",),
    ("weight_g", "weight_v"),
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
)
"""Keys of plain prototypes, and of their lengths and directions in torch's two weight norms."""


@dataclass(frozen=True)
class LoadedTeacher:
    """A teacher on the CPU, in eval mode.

    Attributes:
        backbone: (N, 3, H, W) -> (N, features_dim).
        head: (N, features_dim) -> (N, embed_dim), not L2-normalised; ``None`` if there is none.
        prototypes: (K, embed_dim) unit rows in fp32; ``None`` if there are none.
        features_dim: width of the backbone's output.
        embed_dim: width of the head's output, ``features_dim`` without a head.
        mean: per channel, of the images that the teacher was trained with; likewise ``std``.
        input_size: side of the images in pixels.
        digest: first 16 hex digits of the file's SHA-256; of the weights' if there is no file.
        description: one-line summary.

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
        name: what the teacher is and where it comes from, for description and messages.
        digest: as in :class:`LoadedTeacher`; likewise ``mean``, ``std`` and ``input_size``.
        head: weights of the head by key, which begins with ``head_prefix`` in the file.
        activation: of the head's hidden layers.
        prototypes: (K, D), rows of any length above 0; their key in the file is ``prototypes_key``.
        notes: remarks to add to the description.

    Raises:
        UserError: the parts do not fit together, or the output is not finite vectors.

    >>> network = nn.Sequential(nn.Flatten(), nn.LazyLinear(16))
    >>> rest = {"name": "mine", "digest": "", "mean": [0.5] * 3, "std": [0.25] * 3}
    >>> head = {"weight": torch.ones(4, 16)}
    >>> assemble(network, **rest, input_size=8, head=head).description
    'mine: 16 features, head 4, no prototypes'
    """
    # Use a separate generator: loading a teacher must not change a student's draws.
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


def prototype_rows(
    weights: Mapping[str, Tensor], prefix: str, source: str
) -> tuple[Tensor | None, str]:
    """The prototypes of a last layer, plain or with weight norm, and their key in the file.

    With weight norm only the direction is returned: :func:`assemble` normalises rows anyway.

    Raises:
        UserError: there are unexpected weights.

    >>> prototype_rows({"weight": Tensor([[1.0, 0.0]])}, "prototypes.", "the file")
    (tensor([[1., 0.]]), 'prototypes.weight')
    """
    for names in _PROTOTYPES:
        if weights.keys() == set(names):
            return weights[names[-1]], prefix + names[-1]
    remedy = f"prototypes are one of {', '.join(map(' and '.join, _PROTOTYPES))}"
    refuse_keys([prefix + k for k in weights], source, remedy)
    return None, ""


def load_head(
    weights: Mapping[str, Tensor], in_dim: int, activation: Activation, prefix: str = ""
) -> nn.Sequential:
    """Rebuilds a head of linear layers, batch norms and activations from its weights.

    Args:
        weights: of an ``nn.Sequential`` by key, such as ``0.weight``, or of one linear layer. A
            missing number between two layers is an activation.
        in_dim: D of the features that the head takes.
        activation: of the hidden layers; weights do not show it.
        prefix: prefix of the keys in their file, for messages.

    Returns:
        (N, in_dim) -> (N, embed_dim), not L2-normalised.

    Raises:
        ValueError: keys do not belong to such a head, or their shapes contradict each other; the
            message names the first.

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
    strange = [k for k in held if not _HEAD_KEY.fullmatch(k)]
    if strange:
        raise ValueError(f"unexpected: {', '.join(prefix + k for k in strange[:3])}")
    # Build on the meta device: widths from a damaged file may need any amount of memory.
    with torch.device("meta"):
        head = _layers(held, in_dim, activation)
    faults = misfits(head[0] if single else head, weights, prefix)
    if faults:
        raise ValueError(faults)
    head.to_empty(device="cpu").load_state_dict(held)
    return head


def _layers(weights: Mapping[str, Tensor], width: int, activation: Activation) -> nn.Sequential:
    """Layers up to the first two missing numbers in a row; shapes are not checked."""
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

    ``batch_norm`` says whether hidden layers are normalised; ``None``: as in ``like``.

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
