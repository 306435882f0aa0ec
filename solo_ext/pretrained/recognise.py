"""Recognises trained networks by one word: a model of a library, a run, an export, or a file.

The layout of a file is recognised from the prefixes of its keys, and its architecture from their
shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from solo_ext.core.errors import ConfigError, UserError, first_line, suggest_name
from solo_ext.core.files import read_text
from solo_ext.host.backbones import is_timm
from solo_ext.host.names import PREFIX
from solo_ext.memory.teacher import TeacherKwargs
from solo_ext.pretrained import exported
from solo_ext.pretrained.files import misfits, read_checkpoint, read_safetensors, wrapping
from solo_ext.pretrained.libraries import (
    CLASSIFIERS,
    WRAPPERS,
    build_architecture,
    check_tag,
    fitted,
    read_weights,
)
from solo_ext.pretrained.loaded import KEY, LoadedTeacher
from solo_ext.pretrained.runs import ARGS
from solo_ext.pretrained.teachers import load_teacher, split_file

Layout = Literal["run", "export", "moco_v2", "swav", "dino", "timm", "torchvision"]
TORCHVISION = "torchvision/"
_KNOWN = (
    "a run directory, a checkpoint or an export of solo-learn or solo_ext, a file of MoCo v2, "
    "SwAV, DINO, DINOv2, timm or torchvision, timm/<model> or torchvision/<model>"
)
_BASIC: dict[tuple[int, ...], list[str]] = {(2, 2, 2, 2): ["resnet18"], (3, 4, 6, 3): ["resnet34"]}
_BOTTLENECK: dict[tuple[int, ...], list[str]] = {
    (3, 4, 6, 3): ["resnet50", "wide_resnet50_2", "resnext50_32x4d"],
    (3, 4, 23, 3): ["resnet101", "wide_resnet101_2", "resnext101_32x8d", "resnext101_64x4d"],
    (3, 8, 36, 3): ["resnet152"],
}
"""torchvision's ResNets by the numbers of their blocks."""
_SIZES = {
    (192, 12): "tiny",
    (384, 12): "small",
    (768, 12): "base",
    (1024, 24): "large",
    (1280, 32): "huge",
    (1408, 40): "giant",
    (1536, 40): "giant",
}
"""Names of vision transformers by width and depth."""
_TIMM_VIT = "blocks.0.attn.qkv.weight"
_TORCHVISION_VIT = "encoder.layers.encoder_layer_0.ln_1.weight"
_TORCHVISION_VITS = ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14")
_OF_FOLDERS = ("config.json", "model.safetensors")
"""Files of a model in timm's folders."""


def recognise_teacher(word: str, key: str = KEY) -> TeacherKwargs:
    """Finds out what a word names, so that ``method_kwargs.teacher`` need not be written.

    Args:
        word: ``timm/<model>[.<tag>]`` or ``torchvision/<model>[:<tag>]``, whose weights their
            library fetches; or the path of a run directory, a checkpoint in one, an export, or a
            file of MoCo v2, SwAV, DINO, DINOv2, timm or torchvision. Of a file that names no
            architecture, ResNets and vision transformers are recognised.
        key: key or option that the word was given for; part of messages.

    Returns:
        Settings that :func:`~solo_ext.pretrained.teachers.load_teacher` takes.

    Raises:
        ConfigError: there is nothing of that name, its layout or architecture is not known, or more
            than one fits; the message says what was found and what to write.
        UserError: a file cannot be read.

    >>> recognise_teacher("timm/vit_small_patch14_dinov2.lvd142m").model
    'vit_small_patch14_dinov2.lvd142m'
    >>> recognise_teacher("torchvision/resnet51")
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: method_kwargs.teacher='torchvision/resnet51': unknown ...
    """
    source = recognise_source(word, key)
    if source.model is not None or source.layout in ("run", "export"):
        return source
    path = Path(str(source.path))
    if source.layout in ("timm", "torchvision"):
        weights = read_weights(path, f"{word!r}")[2]
    else:
        weights = split_file(source.layout, path).backbone
    found = [*_architectures(weights, source.layout)]
    flat = source.layout in ("timm", "torchvision")
    advice = (
        f'write "{KEY}={{layout: {"timm" if flat else source.layout}, path: {word}, model: NAME}}"'
        f"{' instead' if key != KEY else ''}"
        f"{', or layout: torchvision,' if flat else ''} with the NAME that the model has there"
    )
    if not found:
        problem = f"its architecture is not recognised ({_described(weights)})"
        raise ConfigError(key, word, problem, advice)
    alike = {one.alike(source.layout): one for one in reversed(found)}
    if len(alike) > 1:
        fits = " and ".join(f"{one.model} (mean {one.mean})" for one in alike.values())
        raise ConfigError(key, word, f"its keys and shapes fit {fits}", advice)
    first = found[0]
    return source.model_copy(update={"model": first.model, "model_kwargs": first.kwargs})


def recognise_source(word: str, key: str) -> TeacherKwargs:
    """As :func:`recognise_teacher`, but does not look for the architecture of a file.

    >>> recognise_source("torchvision/resnet50:IMAGENET1K_V2", "backbone.weights").model
    'resnet50:IMAGENET1K_V2'
    """
    path = Path(word).expanduser()
    if not word or not path.exists():
        return _of_library(word, key)
    if path.is_dir():
        return _of_folder(path, word, key)
    return TeacherKwargs(layout=_layout_of(path, word, key), path=str(path))


def _of_library(word: str, key: str) -> TeacherKwargs:
    if word.startswith(PREFIX):
        model = word.removeprefix(PREFIX)
        if not is_timm(word):
            raise ConfigError(key, word, "timm has no such model", _near(model, timm.list_models()))
        check_tag("timm", model, key, word)
        return TeacherKwargs(layout="timm", model=model)
    if word.startswith(TORCHVISION):
        model = word.removeprefix(TORCHVISION)
        check_tag("torchvision", model, key, word)
        return TeacherKwargs(layout="torchvision", model=model)
    raise ConfigError(key, word, "no such file or folder", f"give {_KNOWN}")


def _near(name: str, known: list[str]) -> str:
    return suggest_name(name.partition(".")[0], known, show=0) or "see timm.list_models()"


def _of_folder(path: Path, word: str, key: str) -> TeacherKwargs:
    if any(p.suffix == ".ckpt" for p in path.iterdir()):
        return TeacherKwargs(layout="run", path=str(path))
    config, file = (path / name for name in _OF_FOLDERS)
    if file.is_file() and _is_export(file):
        return TeacherKwargs(layout="export", path=str(path))
    if not (file.is_file() and config.is_file()):
        problem = "a folder without a checkpoint (*.ckpt) or an export (model.safetensors)"
        raise ConfigError(key, word, problem, f"give {_KNOWN}")
    try:
        said = json.loads(read_text(config))
        model, args = said["architecture"], said.get("model_args") or {}
        own = {k: v for k, v in said["pretrained_cfg"].items() if k in ("mean", "std", "tag")}
        if not is_timm(f"{PREFIX}{model}") or not isinstance(args, dict):
            raise ValueError(f"timm has no model {model!r}")
        # Arguments that read other files or the internet are left out: the weights are here.
        kwargs = {k: v for k, v in args.items() if k not in exported.FETCHING}
        known = timm.get_pretrained_cfg(str(model))
        for name in ("mean", "std"):
            if name in own and list(own[name]) != list(getattr(known, name)):
                overlay = kwargs.setdefault("pretrained_cfg_overlay", {})
                overlay[name] = [float(value) for value in own[name]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"its config.json is not of a model of timm ({first_line(error)})"
        raise ConfigError(key, word, problem, f"give {_KNOWN}") from None
    return TeacherKwargs(layout="timm", path=str(file), model=str(model), model_kwargs=kwargs)


def _is_export(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt") as content:
            return exported.KEY in (content.metadata() or {})
    except (SafetensorError, OSError):
        # Reading its weights reports what is wrong with it.
        return False


def _layout_of(path: Path, word: str, key: str) -> Layout:
    """The layout of a file, by the prefixes of its keys."""
    if path.suffix == ".safetensors":
        if _is_export(path):
            return "export"
        layout = _layout_of_weights(read_safetensors(path)) or "timm"
        # DINO published no such files, timm many, of any mean and deviation.
        return "timm" if layout == "dino" else layout
    state = read_checkpoint(path, (argparse.Namespace,))
    wrapper = next((w for w in ("teacher", *WRAPPERS) if isinstance(state.get(w), Mapping)), None)
    weights = state if wrapper is None else state[wrapper]
    prefix = wrapping([str(k) for k in weights])
    weights = {str(k).removeprefix(prefix): v for k, v in weights.items()}
    # Without the file beside a checkpoint of Lightning, reading it says what is missing.
    of_a_run = "pytorch-lightning_version" in state or (path.parent / ARGS).is_file()
    if of_a_run and wrapper == "state_dict" and _any(weights, "backbone.", "encoder."):
        return "run"
    if wrapper == "teacher" and not _any(weights, "dino_head.", "ibot_head."):
        return "dino"
    found = _layout_of_weights(weights)
    if found is None or wrapper == "teacher":
        problem = f"a file of no layout that is known ({_described(weights)})"
        raise ConfigError(key, word, problem, f"give {_KNOWN}")
    return found


def _layout_of_weights(weights: Mapping[str, Any]) -> Layout | None:
    if _any(weights, "encoder_q.") or {"fc.0.weight", "fc.2.weight"} <= weights.keys():
        return "moco_v2"
    if _any(weights, "head.mlp.", "head.last_layer.", "projection_head.mlp."):
        return "dino"
    if _any(weights, "projection_head.", "prototypes."):
        return "swav"
    if _any(weights, "backbone."):
        return "dino" if f"backbone.{_TIMM_VIT}" in weights else "moco_v2"
    if _TORCHVISION_VIT in weights:
        return "torchvision"
    if _TIMM_VIT in weights:
        # Of the files without classifier, DINO's have no LayerScale; they too were trained with
        # ImageNet's mean and deviation, where many of timm's classifiers were not.
        whole = "cls_token" in weights and "norm.weight" in weights
        plain = not _any(weights, *CLASSIFIERS, "blocks.0.ls1.", "fc_norm.", "norm_pre.")
        known = _any(weights, "mask_token", "reg_token", "register_tokens")
        return "dino" if whole and plain and not known else "timm"
    if _any(weights, "layer1.0.conv1."):
        return "torchvision" if next(_resnets(weights), None) else "timm"
    if any(_any(weights, first) for first in ("features.0", "stem", "conv_stem.", "patch_embed.")):
        return "timm"
    return None


def _any(weights: Mapping[str, Any], *prefixes: str) -> bool:
    return any(name.startswith(prefixes) for name in weights)


def _described(weights: Mapping[str, Any]) -> str:
    if not weights:
        return "it is empty"
    shown = [
        f"{name} {tuple(value.shape)}" if isinstance(value, Tensor) else name
        for name, value in [*weights.items()][:2]
    ]
    return f"{len(weights)} entries: {', '.join(shown)}, ..."


# Architectures.


@dataclass(frozen=True)
class _Architecture:
    """A network that weights fit; built on the meta device."""

    model: str
    kwargs: dict[str, Any]
    network: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def alike(self, layout: str) -> tuple[Any, ...]:
        """Equal for networks that compute the same of the same image."""
        # Published layouts have a normalisation of their own.
        own = (self.mean, self.std) if layout == "timm" else ()
        return str(self.network), own


def _architectures(weights: Mapping[str, Tensor], layout: str) -> Iterator[_Architecture]:
    """The networks that weights fit, each with the arguments that make them fit."""
    if "layer1.0.conv1.weight" in weights:
        if layout != "timm":
            yield from _resnets(weights)
        else:
            stages, layers = _blocks(weights)
            # A ResNet is named after the number of its layers.
            names = timm.list_models(f"resnet*{2 + layers * sum(stages)}*")
            yield from _fitting(weights, ((name, {}) for name in names))
    elif _TORCHVISION_VIT in weights:
        patch, side = weights["conv_proj.weight"].shape[-1], _side(weights["encoder.pos_embedding"])
        kwargs = {} if side * patch == 224 else {"image_size": side * patch}
        yield from _fitting(weights, ((name, kwargs) for name in _TORCHVISION_VITS))
    elif _TIMM_VIT in weights and "pos_embed" in weights:
        for one in _transformers(weights):
            published = layout != "timm"
            plain = re.fullmatch(r"vit_[a-z]+_patch\d+_\d+", one.model.removeprefix(PREFIX))
            if plain or not published:
                bare = one.model if published else one.model.removeprefix(PREFIX)
                yield _Architecture(bare, one.kwargs, one.network, one.mean, one.std)


def _resnets(weights: Mapping[str, Any]) -> Iterator[_Architecture]:
    """torchvision's ResNets, and SwAV's wide ones."""
    stages, layers = _blocks(weights)
    names = (_BASIC if layers == 2 else _BOTTLENECK).get(stages, [])
    wide = [f"{names[0]}w{width}" for width in range(2, 6)] if layers == 3 and names else []
    return _fitting(weights, ((name, {}) for name in [*names, *wide]))


def _blocks(weights: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Numbers of blocks of a ResNet's stages, and of convolutions of a block."""
    stages = [{k.split(".")[1] for k in weights if k.startswith(f"layer{n}.")} for n in range(1, 5)]
    return tuple(map(len, stages)), 3 if "layer1.0.conv3.weight" in weights else 2


def _transformers(weights: Mapping[str, Tensor]) -> list[_Architecture]:
    """timm's vision transformers; those that were published for this image size, if there are."""
    positions, patches = weights["pos_embed"], weights["patch_embed.proj.weight"]
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    size, patch = _SIZES.get((positions.shape[-1], depth)), patches.shape[-1]
    image = _side(positions) * patch
    names = timm.list_models([f"vit_{size}_patch{patch}_*", f"deit*_{size}_patch{patch}_*"])
    native: list[tuple[str, dict[str, Any]]] = []
    others = list(native)
    for name in sorted(names, key=len):
        cfg = timm.get_pretrained_cfg(name)
        if cfg is not None and cfg.input_size[-1] == image:
            native.append((PREFIX + name, {}))
        else:
            others.append((PREFIX + name, {"img_size": image}))
    return [*_fitting(weights, native)] or [*_fitting(weights, others)]


def _side(positions: Tensor) -> int:
    """Side of the grid of patches that a table of positions has, besides tokens of its own."""
    count = positions.shape[-2]
    return next((math.isqrt(n) for n in (count - 1, count) if math.isqrt(n) ** 2 == n), 0)


def _fitting(weights: Mapping[str, Tensor], candidates: Any) -> Iterator[_Architecture]:
    for name, kwargs in candidates:
        try:
            with torch.device("meta"):
                network = build_architecture(name, kwargs)
        except Exception:
            # Networks of other kinds fail in their own ways on these arguments.
            continue
        own = network.state_dict()
        given = {k: v for k, v in weights.items() if k in own or not k.startswith(CLASSIFIERS)}
        given = fitted(network, given)
        if not misfits(network, given):
            cfg = getattr(network, "pretrained_cfg", {})
            mean, std = (tuple(cfg.get(part) or ()) for part in ("mean", "std"))
            yield _Architecture(name, dict(kwargs), network, mean, std)


# What a student needs.


@dataclass(frozen=True)
class StudentSettings:
    """What a run of ``seed`` or ``protoseed`` needs to learn from a teacher.

    Attributes:
        method_kwargs: ``teacher``, complete, and the student's ``head``.
        crop_size: side of the large crops, in pixels, that the teacher takes.
        description: the teacher in one line.

    >>> settings = StudentSettings({"head": "mlp"}, crop_size=98, description="a ViT-S/14")
    >>> settings.method_kwargs["head"]
    'mlp'
    """

    method_kwargs: dict[str, Any]
    crop_size: int
    description: str


def student_settings(teacher: TeacherKwargs, crop_size: int) -> StudentSettings:
    """Chooses what follows from a teacher: the student's head, and crops that the teacher takes.

    The teacher is loaded and tried on an image. The head has the layers of the teacher's head if it
    has one, else it is an MLP. A transformer of timm gets its positions resized to the crops, whose
    size becomes a multiple of the patch; any other network that refuses the size gets crops of the
    size that it was trained with.

    Args:
        teacher: of :func:`recognise_teacher`, or written by hand.
        crop_size: side that the large crops should have, in pixels.

    Raises:
        UserError: the teacher cannot be loaded, or takes none of these sizes.

    >>> import tempfile
    >>> file = tempfile.mkdtemp() + "/weights.pth"
    >>> torch.save(timm.create_model("resnet10t").state_dict(), file)
    >>> student_settings(TeacherKwargs(layout="timm", path=file, model="resnet10t"), 96).crop_size
    96
    """
    loaded = load_teacher(teacher)
    patch = _patch_size(loaded.backbone)
    multiple = max(1, round(crop_size / patch)) * patch
    tries: list[tuple[dict[str, Any], int]] = [({}, crop_size)]
    if teacher.layout not in ("run", "export"):
        tries += [({"dynamic_img_size": True}, multiple), ({"img_size": crop_size}, crop_size)]
    tries.append(({}, loaded.input_size))
    for further, side in tries:
        given = teacher.model_copy(update={"model_kwargs": {**teacher.model_kwargs, **further}})
        if _takes(given, loaded if not further else None, side):
            kwargs: dict[str, Any] = {
                "teacher": given.model_dump(),
                "head": "mlp" if loaded.head is None else "teacher",
            }
            return StudentSettings(kwargs, side, loaded.description)
    raise UserError(f"the teacher takes no crops of {crop_size}: {loaded.description}")


def _takes(teacher: TeacherKwargs, loaded: LoadedTeacher | None, side: int) -> bool:
    try:
        loaded = loaded or load_teacher(teacher)
        with torch.no_grad():
            loaded.backbone(torch.zeros(1, 3, side, side))
    except (UserError, RuntimeError, AssertionError, ValueError, TypeError):
        return False
    return True


def _patch_size(backbone: nn.Module) -> int:
    size = getattr(getattr(backbone, "patch_embed", None), "patch_size", 1)
    return int(size[0] if isinstance(size, tuple) else size)
