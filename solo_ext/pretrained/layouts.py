"""Checkpoints in the formats that the authors of MoCo v2, SwAV and DINO published.

Each loader splits the weights by the prefixes of their keys into backbone, head, prototypes, and
those that the layout is known to have besides; others are refused by name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from solo_ext.pretrained.files import check_fit, file_digest, read_checkpoint, refuse_keys, unwrap
from solo_ext.pretrained.libraries import build_architecture, image_side
from solo_ext.pretrained.loaded import KEY, LoadedTeacher, TeacherSource, assemble

_SWAV_STD = (0.228, 0.224, 0.225)
_ONE_OF_SEVERAL = re.compile(r"prototypes\d+\.weight")
_PROTOTYPES = (
    ("weight",),
    ("weight_g", "weight_v"),
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
)
"""Keys of plain prototypes, and of their lengths and directions in torch's two weight norms."""


def load_moco_v2(source: TeacherSource) -> LoadedTeacher:
    """MoCo v2 (arXiv 2003.04297): the query encoder with its head.

    Keys: ``[module.]encoder_q.<torchvision's>`` in ``state_dict``; the head is ``fc.0`` and
    ``fc.2`` there, with ReLU between them. Instead of ``encoder_q.`` the prefix may be
    ``backbone.`` or none, and the head may be missing. Key encoder and queue are ignored.

    Raises:
        UserError: the file is no such checkpoint.

    >>> import tempfile
    >>> import torch
    >>> from solo_ext.methods.distillation import TeacherKwargs
    >>> file, model = tempfile.mkdtemp() + "/weights.pth", "shufflenet_v2_x0_5"
    >>> weights = build_architecture(model, {}).state_dict()
    >>> torch.save({"state_dict": {f"encoder_q.{k}": v for k, v in weights.items()}}, file)
    >>> load_moco_v2(TeacherKwargs(layout="moco_v2", path=file, model=model)).features_dim
    1024
    """
    title = f"MoCo v2 checkpoint {source.path!r}"
    outer, weights = unwrap(read_checkpoint(Path(str(source.path))), "state_dict", title)
    inner = next((p for p in ("encoder_q.", "backbone.") if _has(weights, p)), "")
    backbone = _take(weights, inner)
    if inner == "encoder_q.":
        _take(weights, "encoder_k.")
        for extra in ("queue", "queue_ptr"):
            weights.pop(extra, None)
    _refuse_rest(weights, outer, title, "encoder_q.*, encoder_k.*, queue, queue_ptr")
    start = f"{outer}{inner}fc."
    head = _take(backbone, "fc.")
    # A single linear layer would be a classifier, or MoCo v1's head.
    single = {k: v for k, v in head.items() if not k[0].isdigit()}
    _refuse_rest(single, start, title, "fc.0.* and fc.2.*, the head, or none of fc.*")
    return _assembled(
        source, "resnet50", backbone, title, outer + inner, head=head, head_prefix=start
    )


def load_swav(source: TeacherSource) -> LoadedTeacher:
    """SwAV (arXiv 2006.09882) and its DeepCluster v2: backbone, projection head, prototypes.

    Keys: ``[module.]<torchvision's>``, at top level or in ``state_dict``; the head is
    ``projection_head.0``, batch norm ``.1``, ReLU, ``.3``; then ``prototypes.weight`` (K, D).
    Several sets of prototypes, as in DeepCluster v2, are ignored. Images were normalised with a
    standard deviation of (0.228, 0.224, 0.225).

    Raises:
        UserError: the file is no such checkpoint.

    >>> import tempfile
    >>> import torch
    >>> from solo_ext.methods.distillation import TeacherKwargs
    >>> file, model = tempfile.mkdtemp() + "/weights.pth", "shufflenet_v2_x0_5"
    >>> weights = build_architecture(model, {}).state_dict()
    >>> torch.save({**weights, "prototypes.weight": torch.randn(20, 1024)}, file)
    >>> load_swav(TeacherKwargs(layout="swav", path=file, model=model)).prototypes.shape
    torch.Size([20, 1024])
    """
    title = f"SwAV checkpoint {source.path!r}"
    outer, backbone = unwrap(read_checkpoint(Path(str(source.path))), "state_dict", title)
    head = _take(backbone, "projection_head.")
    layer = _take(backbone, "prototypes.")
    several = bool(layer) and all(_ONE_OF_SEVERAL.fullmatch(k) for k in layer)
    rows, key = prototype_rows({} if several else layer, f"{outer}prototypes.", title)
    return _assembled(
        source,
        "resnet50",
        backbone,
        title,
        outer,
        head=head,
        head_prefix=f"{outer}projection_head.",
        prototypes=rows,
        prototypes_key=key,
        std=_SWAV_STD,
        notes=[f"{len(layer)} sets of prototypes not taken"] if several else [],
    )


def load_dino(source: TeacherSource) -> LoadedTeacher:
    """DINO (arXiv 2104.14294): the teacher of a full checkpoint, or a file with only a backbone.

    Keys of ``teacher``: ``[module.]backbone.<torchvision's or timm's>``, head ``head.mlp.*`` with
    GELU, ``head.last_layer`` (K, D), plain or weight-normed. Older files have the backbone without
    prefix and the head as ``projection_head``. The head of the published ResNet-50, two linear
    layers with batch norm and plain prototypes, differs from the one in the published code.

    Raises:
        UserError: the file is no such checkpoint.

    >>> import tempfile
    >>> import torch
    >>> from solo_ext.methods.distillation import TeacherKwargs
    >>> file, model = tempfile.mkdtemp() + "/weights.pth", "shufflenet_v2_x0_5"
    >>> weights = build_architecture(model, {}).state_dict()
    >>> torch.save({"teacher": {f"module.backbone.{k}": v for k, v in weights.items()}}, file)
    >>> load_dino(TeacherKwargs(layout="dino", path=file, model=model)).features_dim
    1024
    """
    title = f"DINO checkpoint {source.path!r}"
    state = read_checkpoint(Path(str(source.path)), (argparse.Namespace,))
    outer, weights = unwrap(state, "teacher", title)
    start = "projection_head." if _has(weights, "projection_head.") else "head."
    head = _take(weights, start + "mlp.")
    layer = _take(weights, start + "last_layer.")
    inner = "backbone." if _has(weights, "backbone.") else ""
    backbone = _take(weights, inner)
    _refuse_rest(weights, outer, title, "backbone.*, head.mlp.*, head.last_layer.*")
    rows, key = prototype_rows(layer, f"{outer}{start}last_layer.", title)
    return _assembled(
        source,
        "timm/vit_small_patch16_224" if _has(backbone, "blocks.") else "resnet50",
        backbone,
        title,
        outer + inner,
        head=head,
        head_prefix=f"{outer}{start}mlp.",
        activation="gelu",
        prototypes=rows,
        prototypes_key=key,
    )


def _assembled(
    source: TeacherSource,
    published: str,
    backbone: Mapping[str, Tensor],
    title: str,
    prefix: str,
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD,
    **behind: Any,
) -> LoadedTeacher:
    """Builds the architecture that the config names, or the published one, and adds the parts."""
    model = source.model or published
    network = build_architecture(model, source.model_kwargs)
    remedy = f"if it is another one, name it by {KEY}.model"
    check_fit(network, backbone, title, f"the architecture {model!r}", remedy, prefix)
    network.load_state_dict(backbone)
    return assemble(
        network,
        name=f"{model} of {title}",
        digest=file_digest(Path(str(source.path))),
        mean=IMAGENET_DEFAULT_MEAN,
        std=std,
        input_size=image_side(source.model_kwargs),
        **behind,
    )


def prototype_rows(
    weights: Mapping[str, Tensor], prefix: str, source: str
) -> tuple[Tensor | None, str]:
    """The prototypes of a last layer, plain or with weight norm, and their key in the file.

    With weight norm only the direction is returned: the rows have unit length anyway.

    Raises:
        UserError: unexpected weights.

    >>> prototype_rows({"weight": Tensor([[1.0, 0.0]])}, "prototypes.", "the file")
    (tensor([[1., 0.]]), 'prototypes.weight')
    """
    for names in _PROTOTYPES:
        if weights.keys() == set(names):
            return weights[names[-1]], prefix + names[-1]
    remedy = f"prototypes are one of {', '.join(map(' and '.join, _PROTOTYPES))}"
    refuse_keys([prefix + k for k in weights], source, remedy)
    return None, ""


def _has(weights: Mapping[str, Tensor], prefix: str) -> bool:
    return any(k.startswith(prefix) for k in weights)


def _take(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Moves the weights with a prefix out of a state dict; removes the prefix."""
    found = [k for k in weights if k.startswith(prefix)]
    return {k.removeprefix(prefix): weights.pop(k) for k in found}


def _refuse_rest(weights: Mapping[str, Tensor], prefix: str, source: str, allowed: str) -> None:
    refuse_keys([prefix + k for k in weights], source, f"allowed: {allowed}")
