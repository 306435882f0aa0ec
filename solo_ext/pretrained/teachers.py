"""Loads and tests the teacher that the settings of a config describe.

The files that the authors of MoCo v2, SwAV and DINO published are read here: their weights are
split by the prefixes of their keys into backbone, head, prototypes, and known entries that are
ignored; keys with any other prefix are refused by name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.memory.teacher import TeacherKwargs
from solo_ext.pretrained.files import check_fit, file_digest, read_checkpoint, refuse_keys, unwrap
from solo_ext.pretrained.libraries import (
    build_architecture,
    image_side,
    load_timm,
    load_torchvision,
)
from solo_ext.pretrained.loaded import KEY, LoadedTeacher, assemble, prototype_rows
from solo_ext.pretrained.runs import load_run

_META = "https://dl.fbaipublicfiles.com"
_PUBLISHED: dict[str, tuple[str, ...]] = {
    "moco_v2": (f"{_META}/moco/moco_checkpoints/moco_v2_800ep/moco_v2_800ep_pretrain.pth.tar",),
    "swav": (f"{_META}/deepcluster/swav_800ep_pretrain.pth.tar",),
    "dino": (
        f"{_META}/dino/dino_resnet50_pretrain/dino_resnet50_pretrain_full_checkpoint.pth",
        f"{_META}/dino/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain_full_checkpoint.pth",
    ),
}
_SWAV_STD = (0.228, 0.224, 0.225)
_ONE_OF_SEVERAL = re.compile(r"prototypes\d+\.weight")


def check_source(source: TeacherKwargs) -> None:
    """Refuses settings that can be recognised as wrong without reading the teacher.

    Raises:
        ConfigError: a setting is missing, names a missing file, or does not belong to the layout.

    >>> check_source(TeacherKwargs(layout="timm"))
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: method_kwargs.teacher.model=null: layout timm needs a model...
    """
    layout, path = source.layout, source.path
    run, library = layout == "run", layout in ("timm", "torchvision")
    urls = " or ".join(_PUBLISHED.get(layout, ()))
    get = f"{f'download {urls} and ' if urls else ''}name it by {KEY}.path=..."
    kind = "a run directory or checkpoint" if run else "a file"
    example = f"for example resnet50{'.a1_in1k' if layout == 'timm' else ':IMAGENET1K_V2'}"
    told = "a run says itself what it is"
    for wrong, name, problem, remedy in (
        (path is None and not library, "path", f"layout {layout} needs {kind}", get),
        (path is not None and not Path(path).exists(), "path", "there is no such file", get),
        (run and source.model is not None, "model", told, "drop it"),
        (run and source.model_kwargs != {}, "model_kwargs", told, "drop it"),
        (not run and source.networks != "online", "networks", "only a run has two", "drop it"),
        (library and source.model is None, "model", f"layout {layout} needs a model", example),
    ):
        if wrong:
            raise ConfigError(f"{KEY}.{name}", getattr(source, name), problem, remedy)


def load_teacher(source: TeacherKwargs) -> LoadedTeacher:
    """Loads a teacher onto the CPU and tests its shapes and a forward pass.

    Files are read without running code in them. Keys must be exactly those of the architecture, the
    head and the prototypes, except for other entries that the layout is known to have.

    Raises:
        UserError: there is no such file, or it is not what the source says; the message names the
            first keys at fault.

    >>> import tempfile
    >>> import torch
    >>> file, model = tempfile.mkdtemp() + "/weights.pth", "shufflenet_v2_x0_5"
    >>> weights = build_architecture(model, {}).state_dict()
    >>> torch.save({**weights, "prototypes.weight": torch.randn(20, 1024)}, file)
    >>> load_teacher(TeacherKwargs(layout="swav", path=file, model=model)).prototypes.shape
    torch.Size([20, 1024])
    """
    check_source(source)
    return _LOADERS[source.layout](source)


def _load_moco_v2(source: TeacherKwargs) -> LoadedTeacher:
    """MoCo v2 (arXiv 2003.04297): the query encoder with its head.

    Keys: ``[module.]encoder_q.<torchvision's>`` in ``state_dict``; the head is ``fc.0`` and
    ``fc.2`` there, with ReLU between them. Instead of ``encoder_q.`` the prefix may be
    ``backbone.`` or none, and the head may be missing. Key encoder and queue are ignored.
    """
    title = f"MoCo v2 checkpoint {source.path!r}"
    outer, weights = unwrap(read_checkpoint(Path(str(source.path))), "state_dict", title)
    inner = next((p for p in ("encoder_q.", "backbone.") if _has(weights, p)), "")
    backbone = _take(weights, inner)
    if inner == "encoder_q.":
        _take(weights, "encoder_k.")
        for extra in ("queue", "queue_ptr"):
            weights.pop(extra, None)
    allowed = "allowed: encoder_q.*, encoder_k.*, queue, queue_ptr"
    refuse_keys([outer + key for key in weights], title, allowed)
    start = f"{outer}{inner}fc."
    head = _take(backbone, "fc.")
    # A single linear layer would be a classifier, or MoCo v1's head.
    single = [start + key for key in head if not key[0].isdigit()]
    refuse_keys(single, title, "allowed: fc.0.* and fc.2.*, the head, or none of fc.*")
    return _assembled(
        source, "resnet50", backbone, title, outer + inner, head=head, head_prefix=start
    )


def _load_swav(source: TeacherKwargs) -> LoadedTeacher:
    """SwAV (arXiv 2006.09882) and its DeepCluster v2: backbone, projection head, prototypes.

    Keys: ``[module.]<torchvision's>``, at top level or in ``state_dict``; the head is
    ``projection_head.0``, batch norm ``.1``, ReLU, ``.3``; then ``prototypes.weight`` (K, D).
    Several sets of prototypes, as in DeepCluster v2, are ignored. Images were normalised with a
    standard deviation of (0.228, 0.224, 0.225).
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


def _load_dino(source: TeacherKwargs) -> LoadedTeacher:
    """DINO (arXiv 2104.14294): the teacher of a full checkpoint, or a file with only a backbone.

    Keys of ``teacher``: ``[module.]backbone.<torchvision's or timm's>``, head ``head.mlp.*`` with
    GELU, ``head.last_layer`` (K, D), plain or weight-normed. Older files have the backbone without
    prefix and the head as ``projection_head``. The head of the published ResNet-50, two linear
    layers with batch norm and plain prototypes, differs from the one in the published code.
    """
    title = f"DINO checkpoint {source.path!r}"
    state = read_checkpoint(Path(str(source.path)), (argparse.Namespace,))
    outer, weights = unwrap(state, "teacher", title)
    start = "projection_head." if _has(weights, "projection_head.") else "head."
    head = _take(weights, start + "mlp.")
    layer = _take(weights, start + "last_layer.")
    inner = "backbone." if _has(weights, "backbone.") else ""
    backbone = _take(weights, inner)
    allowed = "allowed: backbone.*, head.mlp.*, head.last_layer.*"
    refuse_keys([outer + key for key in weights], title, allowed)
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


_LOADERS = {
    "run": load_run,
    "moco_v2": _load_moco_v2,
    "swav": _load_swav,
    "dino": _load_dino,
    "timm": load_timm,
    "torchvision": load_torchvision,
}


def _assembled(
    source: TeacherKwargs,
    published: str,
    backbone: Mapping[str, Tensor],
    title: str,
    prefix: str,
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD,
    **behind: Any,
) -> LoadedTeacher:
    """Builds the architecture of the config, or the published one, and adds head and prototypes."""
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


def _has(weights: Mapping[str, Tensor], prefix: str) -> bool:
    return any(k.startswith(prefix) for k in weights)


def _take(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Moves the weights with a prefix out of a state dict, and removes the prefix."""
    found = [k for k in weights if k.startswith(prefix)]
    return {k.removeprefix(prefix): weights.pop(k) for k in found}
