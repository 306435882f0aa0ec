"""Checkpoints of MoCo v2 (Chen et al., 2020, arXiv 2003.04297)."""

from __future__ import annotations

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from solo_ext.pretrained.architectures import torchvision_names
from solo_ext.pretrained.files import file_digest, read_checkpoint
from solo_ext.pretrained.layouts import (
    file_of,
    image_side,
    load_backbone,
    named,
    refuse_rest,
    strip_parallel,
    take,
    unwrap,
)
from solo_ext.pretrained.loaded_teacher import LoadedTeacher, Projection, assemble
from solo_ext.pretrained.teacher_source import TeacherSource

_ALLOWED = "encoder_q.*, encoder_k.*, queue, queue_ptr"


def load_moco_v2(source: TeacherSource) -> LoadedTeacher:
    """Loads the query encoder with its head; key encoder and queue, where present, are left.

    Keys: ``[module.]encoder_q.<torchvision's>`` in ``state_dict``; the head is ``fc.0`` and
    ``fc.2`` there, with ReLU between them. The prefix ``encoder_q.`` may be ``backbone.`` or have
    been taken off, and the head may be missing.

    Raises:
        UserError: the file is no such checkpoint.
    """
    path = file_of(source)
    title = named(path, "MoCo v2")
    state = read_checkpoint(path)
    outer, weights = strip_parallel(unwrap(state, "state_dict", title), title)
    prefixes = ("encoder_q.", "backbone.")
    inner = next((p for p in prefixes if any(k.startswith(p) for k in weights)), "")
    backbone = take(weights, inner)
    if inner == "encoder_q.":
        take(weights, "encoder_k.")
        for extra in ("queue", "queue_ptr"):
            weights.pop(extra, None)
    refuse_rest(weights, outer, title, _ALLOWED)
    head = take(backbone, "fc.")
    # One linear layer there is a classifier, or MoCo v1's head.
    single = {k: v for k, v in head.items() if not k[0].isdigit()}
    refuse_rest(single, f"{outer}{inner}fc.", title, "fc.0.* and fc.2.*, the head, or none of fc.*")
    arch = state.get("arch")
    model = source.model or (arch if arch in torchvision_names() else "resnet50")
    network = load_backbone(model, source.model_kwargs, backbone, title, outer + inner)
    return assemble(
        network,
        Projection(head=head, head_prefix=f"{outer}{inner}fc."),
        name=f"{model} of {title}",
        digest=file_digest(path),
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        input_size=image_side(source.model_kwargs),
    )
