"""Checkpoints of SwAV (Caron et al., 2020, arXiv 2006.09882), and of its DeepCluster v2."""

from __future__ import annotations

import re

from timm.data.constants import IMAGENET_DEFAULT_MEAN

from solo_ext.pretrained.files import file_digest, read_checkpoint
from solo_ext.pretrained.layouts import (
    file_of,
    image_side,
    load_backbone,
    named,
    prototype_rows,
    strip_parallel,
    take,
    unwrap,
)
from solo_ext.pretrained.loaded_teacher import LoadedTeacher, Projection, assemble
from solo_ext.pretrained.teacher_source import TeacherSource

_STD = (0.228, 0.224, 0.225)
_ONE_OF_SEVERAL = re.compile(r"prototypes\d+\.weight")


def load_swav(source: TeacherSource) -> LoadedTeacher:
    """Loads the backbone, the projection head and the prototypes.

    Keys: ``[module.]<torchvision's>``, by themselves or in ``state_dict``; the head is
    ``projection_head.0``, batch norm ``.1``, ReLU, ``.3``; then ``prototypes.weight`` (K, D).
    Several sets of prototypes, as DeepCluster v2 has, are left. Images were normalised with a
    standard deviation of (0.228, 0.224, 0.225).

    Raises:
        UserError: the file is no such checkpoint.
    """
    path = file_of(source)
    title = named(path, "SwAV")
    weights = unwrap(read_checkpoint(path), "state_dict", title)
    outer, backbone = strip_parallel(weights, title)
    head = take(backbone, "projection_head.")
    layer = take(backbone, "prototypes.")
    several = bool(layer) and all(_ONE_OF_SEVERAL.fullmatch(k) for k in layer)
    rows, key = prototype_rows({} if several else layer, f"{outer}prototypes.", title)
    model = source.model or "resnet50"
    network = load_backbone(model, source.model_kwargs, backbone, title, outer)
    return assemble(
        network,
        Projection(
            head=head,
            head_prefix=f"{outer}projection_head.",
            prototypes=rows,
            prototypes_key=key,
        ),
        name=f"{model} of {title}",
        digest=file_digest(path),
        mean=IMAGENET_DEFAULT_MEAN,
        std=_STD,
        input_size=image_side(source.model_kwargs),
        notes=[f"{len(layer)} sets of prototypes not taken"] if several else [],
    )
