"""Networks of timm and torchvision without classifier: new, from a local file, or downloaded."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from timm.data import resolve_model_data_config  # type: ignore[attr-defined]
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from solo_ext.core.errors import ConfigError, UserError, nearest
from solo_ext.pretrained.files import (
    check_fit,
    file_digest,
    read_checkpoint,
    read_safetensors,
    state_digest,
    unwrap,
)
from solo_ext.pretrained.teachers import KEY, LoadedTeacher, TeacherSource, assemble

TIMM = "timm/"
_WIDE = re.compile(r"(resnet(?:50|101|152))w([2-5])")
_BLOCKS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3], "resnet152": [3, 8, 36, 3]}
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Entries of a training checkpoint with the weights; like the libraries, averaged ones first."""


def load_timm(source: TeacherSource) -> LoadedTeacher:
    """Any timm model without its classifier; mean, deviation and size are from its own config.

    ``path`` is a file of weights in timm's format (safetensors or ``torch.save``); without it timm
    downloads those of the tag, or of its default tag.

    Raises:
        UserError: unknown model or tag, weights of another model, or a failed download.
    """
    name = str(source.model)
    model = timm_name(name if name.startswith(TIMM) else TIMM + name)
    bare, _, tag = model.partition(".")
    tags = [m.partition(".")[2] for m in timm.list_pretrained(f"{bare}.*")]
    if tag and tag not in tags:
        raise ConfigError(f"{KEY}.model", name, f"timm has no weights {tag!r}", nearest(tag, tags))
    network: Any
    notes: list[str] = []
    if source.path is None:
        # Load it with its classifier: without one, timm accepts missing keys.
        network = _fetched(
            model,
            source,
            lambda: timm.create_model(model, pretrained=True, **source.model_kwargs),
            f"timm cannot get the weights of {model!r}",
            "fetch them",
        )
        network.reset_classifier(0)
        tag = network.pretrained_cfg.get("tag")
        title, digest = f"{bare}.{tag} of timm" if tag else f"{bare} of timm", None
    else:
        with _building(model, source.model_kwargs):
            network = timm.create_model(model, **{"num_classes": 0, **source.model_kwargs})
        classifiers = network.pretrained_cfg.get("classifier") or ()
        classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
        path = Path(source.path)
        title, digest = f"{bare} of timm checkpoint {str(path)!r}", file_digest(path)
        notes = _load_file(network, path, "timm", classifiers, model)
    config = resolve_model_data_config(network)  # type: ignore[no-untyped-call]
    return assemble(
        network,
        name=title,
        digest=digest or state_digest(network.state_dict()),
        mean=config["mean"],
        std=config["std"],
        input_size=image_side(source.model_kwargs, config["input_size"][-1]),
        notes=notes,
    )


def load_torchvision(source: TeacherSource) -> LoadedTeacher:
    """Any torchvision model without its last linear layer.

    ``path`` is a file of weights in torchvision's format; without it torchvision downloads those of
    the tag after the colon, or of its default tag. Mean, deviation and size are the tag's; a local
    file has ImageNet's, unless a tag is given.

    Raises:
        UserError: unknown model or tag, weights of another model, or a failed download.
    """
    given = str(source.model)
    name, _, tag = given.partition(":")
    if name not in torchvision_names():
        known = nearest(name, torchvision_names())
        raise ConfigError(f"{KEY}.model", given, "unknown architecture", known)
    entries: Any = torchvision.models.get_model_weights(name)
    tags = [entry.name for entry in entries]
    if tag and tag not in tags:
        remedy = nearest(tag, tags)
        raise ConfigError(f"{KEY}.model", given, f"torchvision has no weights {tag!r}", remedy)
    weights = entries[tag] if tag else entries.DEFAULT
    kwargs, notes = source.model_kwargs, list[str]()
    if source.path is None:
        network = _fetched(
            name,
            source,
            lambda: torchvision.models.get_model(name, weights=weights, progress=False, **kwargs),
            f"torchvision cannot get {weights}",
            f"fetch {weights.url}",
        )
        network, _ = without_classifier(network, name)
        title, digest = f"torchvision's {weights.name}", state_digest(network.state_dict())
    else:
        path = Path(source.path)
        title, digest = f"torchvision checkpoint {str(path)!r}", file_digest(path)
        with _building(name, kwargs):
            network = torchvision_model(name, kwargs)
        network, classifier = without_classifier(network, name)
        notes = _load_file(network, path, "torchvision", (classifier,), name)
    preset = weights.transforms()
    own = tag or source.path is None
    return assemble(
        network,
        name=f"{name} of {title}",
        digest=digest,
        mean=preset.mean if own else IMAGENET_DEFAULT_MEAN,
        std=preset.std if own else IMAGENET_DEFAULT_STD,
        input_size=image_side(kwargs, preset.crop_size[0]),
        notes=notes,
    )


def _fetched(
    model: str, source: TeacherSource, fetch: Callable[[], Any], fault: str, remedy: str
) -> Any:
    try:
        with _building(model, source.model_kwargs):
            return fetch()
    except ConfigError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{fault}: {reason}; {remedy} where there is a network and name the file by {KEY}.path"
        ) from error


def _load_file(
    network: nn.Module, path: Path, library: str, classifiers: Collection[str], model: str
) -> list[str]:
    """Loads the weights of a file into a network, without those of a classifier.

    Returns:
        Description of the weights.

    Raises:
        UserError: the file cannot be read, or has other keys or shapes.
    """
    title = f"{library} checkpoint {str(path)!r}"
    prefix, wrapper = "", ""
    weights: Mapping[str, Tensor]
    if path.suffix == ".safetensors":
        weights = read_safetensors(path)
    else:
        state = read_checkpoint(path, (argparse.Namespace,))
        wrapper = next((w for w in _WRAPPERS if state.get(w) is not None), "state_dict")
        extras = (*_WRAPPERS, "amp_scaler", "metric", "version")
        prefix, weights = unwrap(state, wrapper, title, extras)
    dropped = {f"{name}.{field}" for name in classifiers for field in ("weight", "bias")}
    weights = {k: v for k, v in weights.items() if k not in dropped}
    target = f"the model {model!r} without classifier"
    check_fit(network, weights, title, target, f"is it the file of another {KEY}.model?", prefix)
    network.load_state_dict(weights)
    return ["averaged weights"] if wrapper.endswith("_ema") else []


class WideResNet(ResNet):  # type: ignore[misc]
    """Bottleneck ResNet with every layer ``width`` times as wide, like SwAV's w2, w4 and w5.

    torchvision's ``wide_resnet50_2`` is different: only its inner convolutions are wider.
    """

    def __init__(self, blocks: list[int], width: int) -> None:
        self.width = width
        super().__init__(Bottleneck, blocks)
        self.fc = nn.Identity()

    def _make_layer(self, block: Any, planes: int, blocks: int, **kwargs: Any) -> nn.Sequential:
        if planes == 64:
            self.inplanes *= self.width
            self.conv1 = nn.Conv2d(3, self.inplanes, 7, stride=2, padding=3, bias=False)
            self.bn1 = nn.BatchNorm2d(self.inplanes)
        return super()._make_layer(block, planes * self.width, blocks, **kwargs)  # type: ignore[no-any-return]


def build_architecture(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """Builds a network without its classifier; keeps the global random state.

    Args:
        name: torchvision's, optionally followed by ``w2`` to ``w5`` for SwAV's wide ResNets; or
            ``timm/`` and timm's name, or timm's name alone if torchvision has no such model.
        kwargs: arguments of its constructor.

    Raises:
        ConfigError: unknown name, or arguments that it does not take.

    Example:
        >>> network = build_architecture("shufflenet_v2_x0_5", {}).eval()
        >>> network(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 1024])
    """
    wide = _WIDE.fullmatch(name)
    with _building(name, kwargs):
        if wide is not None:
            return WideResNet(_BLOCKS[wide[1]], int(wide[2]), **kwargs)
        if name in torchvision_names():
            return without_classifier(torchvision_model(name, kwargs), name)[0]
        model = timm_name(name)
        return timm.create_model(model, num_classes=0, **kwargs)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _building(name: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Keeps the global random state, and reports the arguments that a constructor refuses."""
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{KEY}.model_kwargs", dict(kwargs), f"{name} refuses it: {error}", "change or drop it"
        ) from error


def torchvision_names() -> list[str]:
    """torchvision's models for images.

    Example:
        >>> "resnet50" in torchvision_names()
        True
    """
    return list(torchvision.models.list_models(module=torchvision.models))


def torchvision_model(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """A model of torchvision with its classifier, without trained weights."""
    # By default these two initialise slowly, and warn about it.
    fast = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **{**fast, **kwargs})
    return model


def timm_name(name: str) -> str:
    """The name for ``timm.create_model``.

    Raises:
        ConfigError: timm has no such model.

    Example:
        >>> timm_name("timm/resnet10t")
        'resnet10t'
    """
    bare = name.removeprefix(TIMM)
    if not timm.is_model(bare):
        known = timm.list_models() if name.startswith(TIMM) else torchvision_names()
        raise ConfigError(
            f"{KEY}.model", name, "unknown architecture", f"{nearest(bare, known)}; or timm/<model>"
        )
    return bare


def without_classifier(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Removes the last linear layer of a torchvision model.

    Returns:
        The model, and the name of the layer.

    Raises:
        ConfigError: it has no linear layer.
    """
    linears = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ConfigError(f"{KEY}.model", name, "it ends in no linear layer", "take another")
    model.set_submodule(linears[-1], nn.Identity())
    return model, linears[-1]


def image_side(kwargs: Mapping[str, Any], default: int = 224) -> int:
    """Side of the images that a model takes: from its arguments, else ``default``.

    Example:
        >>> image_side({"img_size": [96, 96]}), image_side({})
        (96, 224)
    """
    side = kwargs.get("img_size", kwargs.get("image_size", default))
    return int(side[0] if isinstance(side, list | tuple) else side)
