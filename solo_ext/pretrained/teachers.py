"""Loads and tests the teacher that the settings of a config describe.

The files that the authors of MoCo v2, SwAV and DINO published are read here: their weights are
split by the prefixes of their keys into backbone, head, prototypes, and known entries that are
ignored; keys with any other prefix are refused by name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.memory.teacher import TeacherKwargs
from solo_ext.pretrained.files import (
    check_fit,
    file_digest,
    read_checkpoint,
    read_safetensors,
    refuse_keys,
    unwrap,
)
from solo_ext.pretrained.libraries import (
    build_architecture,
    image_side,
    load_timm,
    load_torchvision,
)
from solo_ext.pretrained.loaded import KEY, LoadedTeacher, assemble, prototype_rows
from solo_ext.pretrained.runs import load_export, load_run

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
    layout, path, momentum = source.layout, source.path, source.networks == "momentum"
    run, library = layout in ("run", "export"), layout in ("timm", "torchvision")
    urls = " or ".join(_PUBLISHED.get(layout, ()))
    get = f"{f'download {urls} and ' if urls else ''}name it by {KEY}.path=..."
    kinds = {"run": "a run directory or checkpoint", "export": "what `solo-ext export` wrote"}
    kind = kinds.get(layout, "a file")
    example = f"for example resnet50{'.a1_in1k' if layout == 'timm' else ':IMAGENET1K_V2'}"
    told = f"{'a run' if layout == 'run' else 'an export'} says itself what it is"
    for wrong, name, problem, remedy in (
        (path is None and not library, "path", f"layout {layout} needs {kind}", get),
        (path is not None and not Path(path).exists(), "path", "there is no such file", get),
        (run and source.model is not None, "model", told, "drop it"),
        (run and source.model_kwargs != {}, "model_kwargs", told, "drop it"),
        (momentum and layout != "run", "networks", "only a run has two", "drop it"),
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


@dataclass(frozen=True)
class FileParts:
    """The weights of a published file, by the part of the network; keys are without prefixes.

    Attributes:
        title: kind and name of the file, for messages.
        model: name of the published architecture; empty where the layout has no such one.
        backbone: its weights; ``prefix`` is the prefix of their keys in the file.
        others: keys of all other weights, as they are in the file.
        std: the deviation that images were normalised with.
        behind: arguments of :func:`~solo_ext.pretrained.loaded.assemble` for head and prototypes.

    >>> FileParts("a file", "resnet50", {}, prefix="module.", others=["module.fc.bias"]).others
    ['module.fc.bias']
    """

    title: str
    model: str
    backbone: dict[str, Tensor]
    prefix: str
    others: list[str]
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    behind: dict[str, Any] = field(default_factory=dict)


def split_file(layout: str, path: Path) -> FileParts:
    """Reads a file of MoCo v2, SwAV or DINO, and splits its weights by the prefixes of their keys.

    Raises:
        UserError: there is no such file, or it has keys that its layout does not know.

    >>> import tempfile
    >>> import torch
    >>> file = Path(tempfile.mkdtemp()) / "weights.pth"
    >>> torch.save({"conv1.weight": torch.ones(1), "prototypes.weight": torch.ones(1)}, file)
    >>> parts = split_file("swav", file)
    >>> list(parts.backbone), parts.others
    (['conv1.weight'], ['prototypes.weight'])
    """
    return _SPLIT[layout](path)


def _split_moco_v2(path: Path) -> FileParts:
    """MoCo v2 (arXiv 2003.04297): the query encoder with its head.

    Keys: ``[module.]encoder_q.<torchvision's>`` in ``state_dict``; the head is ``fc.0`` and
    ``fc.2`` there, with ReLU between them. Instead of ``encoder_q.`` the prefix may be
    ``backbone.`` or none, and the head may be missing. Key encoder and queue are ignored.
    """
    title = f"MoCo v2 checkpoint {str(path)!r}"
    outer, weights = unwrap(_content(path), "state_dict", title)
    every = list(weights)
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
    return FileParts(
        title,
        "resnet50",
        backbone,
        outer + inner,
        _others(every, outer, inner, backbone),
        behind={"head": head, "head_prefix": start},
    )


def _split_swav(path: Path) -> FileParts:
    """SwAV (arXiv 2006.09882) and its DeepCluster v2: backbone, projection head, prototypes.

    Keys: ``[module.]<torchvision's>``, at top level or in ``state_dict``; the head is
    ``projection_head.0``, batch norm ``.1``, ReLU, ``.3``; then ``prototypes.weight`` (K, D).
    Several sets of prototypes, as in DeepCluster v2, are ignored. Images were normalised with a
    standard deviation of (0.228, 0.224, 0.225).
    """
    title = f"SwAV checkpoint {str(path)!r}"
    outer, backbone = unwrap(_content(path), "state_dict", title)
    every = list(backbone)
    head = _take(backbone, "projection_head.")
    layer = _take(backbone, "prototypes.")
    several = bool(layer) and all(_ONE_OF_SEVERAL.fullmatch(k) for k in layer)
    rows, key = prototype_rows({} if several else layer, f"{outer}prototypes.", title)
    return FileParts(
        title,
        "resnet50",
        backbone,
        outer,
        _others(every, outer, "", backbone),
        std=_SWAV_STD,
        behind={
            "head": head,
            "head_prefix": f"{outer}projection_head.",
            "prototypes": rows,
            "prototypes_key": key,
            "notes": [f"{len(layer)} sets of prototypes not taken"] if several else [],
        },
    )


def _split_dino(path: Path) -> FileParts:
    """DINO (arXiv 2104.14294): the teacher of a full checkpoint, or a file with only a backbone.

    Keys of ``teacher``: ``[module.]backbone.<torchvision's or timm's>``, head ``head.mlp.*`` with
    GELU, ``head.last_layer`` (K, D), plain or weight-normed. Older files have the backbone without
    prefix and the head as ``projection_head``. The head of the published ResNet-50, two linear
    layers with batch norm and plain prototypes, differs from the one in the published code.
    """
    title = f"DINO checkpoint {str(path)!r}"
    outer, weights = unwrap(_content(path, argparse.Namespace), "teacher", title)
    every = list(weights)
    start = "projection_head." if _has(weights, "projection_head.") else "head."
    head = _take(weights, start + "mlp.")
    layer = _take(weights, start + "last_layer.")
    inner = "backbone." if _has(weights, "backbone.") else ""
    backbone = _take(weights, inner)
    allowed = "allowed: backbone.*, head.mlp.*, head.last_layer.*"
    refuse_keys([outer + key for key in weights], title, allowed)
    rows, key = prototype_rows(layer, f"{outer}{start}last_layer.", title)
    return FileParts(
        title,
        "timm/vit_small_patch16_224" if _has(backbone, "blocks.") else "resnet50",
        backbone,
        outer + inner,
        _others(every, outer, inner, backbone),
        behind={
            "head": head,
            "head_prefix": f"{outer}{start}mlp.",
            "activation": "gelu",
            "prototypes": rows,
            "prototypes_key": key,
        },
    )


def _content(path: Path, *allowed: type) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        return dict(read_safetensors(path))
    return read_checkpoint(path, allowed)


_SPLIT = {"moco_v2": _split_moco_v2, "swav": _split_swav, "dino": _split_dino}


def _load_published(source: TeacherKwargs) -> LoadedTeacher:
    """Builds the architecture of the config, or the published one, and adds head and prototypes."""
    path = Path(str(source.path))
    parts = split_file(source.layout, path)
    model = source.model or parts.model
    network = build_architecture(model, source.model_kwargs)
    remedy = f"if it is another one, name it by {KEY}.model"
    target = f"the architecture {model!r}"
    check_fit(network, parts.backbone, parts.title, target, remedy, parts.prefix)
    network.load_state_dict(parts.backbone)
    return assemble(
        network,
        name=f"{model} of {parts.title}",
        digest=file_digest(path),
        mean=IMAGENET_DEFAULT_MEAN,
        std=parts.std,
        input_size=image_side(source.model_kwargs),
        **parts.behind,
    )


_LOADERS = {
    "run": load_run,
    "export": load_export,
    "moco_v2": _load_published,
    "swav": _load_published,
    "dino": _load_published,
    "timm": load_timm,
    "torchvision": load_torchvision,
}


def _others(every: list[str], outer: str, inner: str, backbone: Mapping[str, Tensor]) -> list[str]:
    """Keys of a file that are not the backbone's, with the prefix that all keys have."""
    return [outer + k for k in every if not (k.startswith(inner) and k[len(inner) :] in backbone)]


def _has(weights: Mapping[str, Tensor], prefix: str) -> bool:
    return any(k.startswith(prefix) for k in weights)


def _take(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Moves the weights with a prefix out of a state dict, and removes the prefix."""
    found = [k for k in weights if k.startswith(prefix)]
    return {k.removeprefix(prefix): weights.pop(k) for k in found}
