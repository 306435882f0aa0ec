"""Checkpoints of DINO (Caron et al., 2021, arXiv 2104.14294)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from solo_ext.pretrained.architectures import torchvision_names
from solo_ext.pretrained.files import file_digest, read_checkpoint
from solo_ext.pretrained.layouts import (
    file_of,
    image_side,
    load_backbone,
    named,
    prototype_rows,
    refuse_rest,
    strip_parallel,
    take,
    unwrap,
)
from solo_ext.pretrained.loaded_teacher import LoadedTeacher, Projection, assemble
from solo_ext.pretrained.teacher_source import TeacherSource

_HEADS = ("head.", "projection_head.")
_ALLOWED = "backbone.*, head.mlp.*, head.last_layer.*"
_SIZES = ("tiny", "small", "base")


def load_dino(source: TeacherSource) -> LoadedTeacher:
    """Loads the teacher network of a full checkpoint, or a file with a backbone alone.

    Keys of ``teacher``: ``[module.]backbone.<torchvision's or timm's>``, head ``head.mlp.*`` with
    GELU, ``head.last_layer`` (K, D), plain or weight-normed. Older files have the backbone without
    prefix and the head as ``projection_head``. The published ResNet-50's head, two linear layers
    with batch norm and plain prototypes, is not the one that its code builds.

    Raises:
        UserError: the file is no such checkpoint.
    """
    path = file_of(source)
    title = named(path, "DINO")
    state = read_checkpoint(path, (argparse.Namespace,))
    extras = ("dino_loss", "student")
    outer, weights = strip_parallel(unwrap(state, "teacher", title, extras), title)
    start = next((p for p in _HEADS if any(k.startswith(p) for k in weights)), _HEADS[0])
    head = take(weights, start + "mlp.")
    layer = take(weights, start + "last_layer.")
    inner = "backbone." if any(k.startswith("backbone.") for k in weights) else ""
    backbone = take(weights, inner)
    refuse_rest(weights, outer, title, _ALLOWED)
    rows, key = prototype_rows(layer, f"{outer}{start}last_layer.", title)
    model = source.model or _architecture(state.get("args"), backbone)
    network = load_backbone(model, source.model_kwargs, backbone, title, outer + inner)
    return assemble(
        network,
        Projection(
            head=head,
            head_prefix=f"{outer}{start}mlp.",
            activation="gelu",
            prototypes=rows,
            prototypes_key=key,
        ),
        name=f"{model} of {title}",
        digest=file_digest(path),
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        input_size=image_side(source.model_kwargs),
    )


def _architecture(args: Any, backbone: Mapping[str, Tensor]) -> str:
    """What the arguments of the training say, else one of the two published ones by its keys."""
    arch, patch = getattr(args, "arch", None), getattr(args, "patch_size", 16)
    if arch in torchvision_names():
        return str(arch)
    if isinstance(arch, str) and arch.removeprefix("vit_").removeprefix("deit_") in _SIZES:
        size = arch.rpartition("_")[2]
        return f"timm/vit_{size}_patch{patch}_224"
    return "timm/vit_small_patch16_224" if "cls_token" in backbone else "resnet50"
