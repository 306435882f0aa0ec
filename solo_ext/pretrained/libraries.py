"""Networks of timm and torchvision without classifiers: new, from a local file, or downloaded."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torchvision
from timm.data import resolve_model_data_config  # type: ignore[attr-defined]
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from solo_ext.core.errors import ConfigError, UserError, first_line, suggest_name
from solo_ext.host.names import PREFIX
from solo_ext.memory.teacher import TeacherKwargs
from solo_ext.pretrained.files import (
    check_fit,
    file_digest,
    misfits,
    read_checkpoint,
    read_safetensors,
    state_digest,
    unwrap,
)
from solo_ext.pretrained.loaded import KEY, LoadedTeacher, assemble

_WIDE = re.compile(r"(resnet(?:50|101|152))w([2-5])")
_BLOCKS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3], "resnet152": [3, 8, 36, 3]}
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Entries of a training checkpoint that hold weights; averages first, as in the libraries."""
CLASSIFIERS = ("fc.", "head.", "head_dist.", "heads.", "classifier.")
"""Prefixes of the classifiers of most models of both libraries."""

_AS_TAGGED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "googlenet": lambda _: {"transform_input": True},
    "inception": lambda _: {"transform_input": True},
    "vit": lambda weights: {"image_size": weights.meta["min_size"][0]},
}
"""Arguments that torchvision takes from a tag when it downloads, by a name's first word."""


def load_timm(source: TeacherKwargs) -> LoadedTeacher:
    """Loads a timm model without its classifier; mean, deviation and size are its own config's.

    ``path`` is a file of weights in timm's format (safetensors or ``torch.save``); without it timm
    downloads those of the tag, or of its default tag.

    Raises:
        UserError: unknown model or tag, weights of another model, or a failed download.

    >>> import tempfile
    >>> file = tempfile.mkdtemp() + "/weights.pth"
    >>> torch.save(timm.create_model("resnet10t").state_dict(), file)
    >>> load_timm(TeacherKwargs(layout="timm", path=file, model="resnet10t")).features_dim
    512
    """
    name = str(source.model)
    model = _timm_name(name if name.startswith(PREFIX) else PREFIX + name)
    bare, _, _ = model.partition(".")
    check_tag("timm", model, f"{KEY}.model", name)
    network: Any
    notes: list[str] = []
    if source.path is None:
        # Load it with its classifier: without one, timm accepts missing keys.
        network = _fetched(
            source, lambda: timm.create_model(model, pretrained=True, **source.model_kwargs), "them"
        )
        network.reset_classifier(0)
        named = ".".join(filter(None, [bare, network.pretrained_cfg.get("tag")]))
        title, digest = f"{named} of timm", state_digest(network.state_dict())
    else:
        network = build_architecture(PREFIX + model, source.model_kwargs)
        classifiers = network.pretrained_cfg.get("classifier") or ()
        classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
        title, digest, notes = _load_file(network, source.path, "timm", classifiers, bare)
    config = resolve_model_data_config(network)  # type: ignore[no-untyped-call]
    return assemble(
        network,
        name=title,
        digest=digest,
        mean=config["mean"],
        std=config["std"],
        input_size=image_side(source.model_kwargs, config["input_size"][-1]),
        notes=notes,
    )


def load_torchvision(source: TeacherKwargs) -> LoadedTeacher:
    """Loads a torchvision model without its last linear layer.

    ``path`` is a file of weights in torchvision's format; without it torchvision downloads those of
    the tag after the colon, or of its default tag. Mean, deviation and size are the tag's; a local
    file has ImageNet's, unless a tag is given.

    Raises:
        UserError: unknown model or tag, weights of another model, or a failed download.

    >>> import tempfile
    >>> file = tempfile.mkdtemp() + "/weights.pth"
    >>> torch.save(torchvision.models.shufflenet_v2_x0_5().state_dict(), file)
    >>> source = TeacherKwargs(layout="torchvision", path=file, model="shufflenet_v2_x0_5")
    >>> load_torchvision(source).features_dim
    1024
    """
    given, kwargs = str(source.model), source.model_kwargs
    name, _, tag = given.partition(":")
    check_tag("torchvision", given, f"{KEY}.model", given)
    entries: Any = torchvision.models.get_model_weights(name)
    weights = entries[tag] if tag else entries.DEFAULT
    notes: list[str] = []
    if source.path is None:
        network = _fetched(
            source,
            lambda: torchvision.models.get_model(name, weights=weights, progress=False, **kwargs),
            weights.url,
        )
        network, _ = _without_classifier(network, name)
        title = f"{name} of torchvision's {weights.name}"
        digest = state_digest(network.state_dict())
    else:
        as_tagged = _AS_TAGGED.get(name.partition("_")[0], lambda _: {})(weights) if tag else {}
        with _building(name, kwargs):
            network = torchvision.models.get_model(name, weights=None, **(as_tagged | kwargs))
        network, classifier = _without_classifier(network, name)
        title, digest, notes = _load_file(network, source.path, "torchvision", (classifier,), name)
    preset = weights.transforms()
    own = tag or source.path is None
    return assemble(
        network,
        name=title,
        digest=digest,
        mean=preset.mean if own else IMAGENET_DEFAULT_MEAN,
        std=preset.std if own else IMAGENET_DEFAULT_STD,
        input_size=image_side(kwargs, preset.crop_size[0]),
        notes=notes,
    )


def check_tag(library: Literal["timm", "torchvision"], model: str, key: str, given: str) -> None:
    """Refuses a model that torchvision does not have, and a tag of weights that neither has.

    Args:
        library: which of the two.
        model: its name, with or without a tag.
        key: where it was given, for the message, as ``given``.

    Raises:
        ConfigError: there is no such model or tag.

    >>> check_tag("timm", "resnet50.a1_in1k", "model", "resnet50.a1_in1k")
    >>> check_tag("torchvision", "resnet50:V3", "model", "resnet50:V3")
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: model='resnet50:V3': torchvision has no weights 'V3'; ...
    """
    if library == "timm":
        bare, _, tag = model.partition(".")
        tags = [m.partition(".")[2] for m in timm.list_pretrained(f"{bare}.*")]
    else:
        bare, _, tag = model.partition(":")
        if bare not in _torchvision_names():
            near = suggest_name(bare, _torchvision_names())
            raise ConfigError(key, given, "unknown architecture", near)
        entries: Any = torchvision.models.get_model_weights(bare)
        tags = [entry.name for entry in entries]
    if tag and tag not in tags:
        remedy = suggest_name(tag, tags)
        raise ConfigError(key, given, f"{library} has no weights {tag!r}", remedy)


def _fetched(source: TeacherKwargs, fetch: Callable[[], Any], what: str) -> Any:
    """A network with its library's weights, from the library's cache or the internet."""
    try:
        with _building(str(source.model), source.model_kwargs):
            return fetch()
    except ConfigError:
        raise
    except Exception as error:
        raise UserError(
            f"{source.layout} cannot get the weights of {source.model!r}: {first_line(error)}; "
            f"fetch {what} where there is a network and name the file by {KEY}.path"
        ) from error


def _load_file(
    network: nn.Module,
    path: str,
    library: str,
    classifiers: Collection[str],
    model: str,
) -> tuple[str, str, list[str]]:
    """Loads a file into a network without classifiers; returns title, digest and notes."""
    file = Path(path)
    title = f"{library} checkpoint {path!r}"
    prefix, wrapper, weights = read_weights(file, title)
    dropped = {f"{name}.{field}" for name in classifiers for field in ("weight", "bias")}
    weights = {k: v for k, v in weights.items() if k not in dropped}
    if model.startswith("densenet"):
        # Published before torchvision renamed these layers, which its own loader does too.
        weights = {re.sub(r"(norm|relu|conv)\.(\d)\.", r"\1\2.", k): v for k, v in weights.items()}
    weights = fitted(network, weights)
    target = f"the model {model!r} without classifier"
    check_fit(network, weights, title, target, f"is it the file of another {KEY}.model?", prefix)
    network.load_state_dict(weights)
    notes = ["averaged weights"] if wrapper.endswith("_ema") else []
    return f"{model} of {title}", file_digest(file), notes


def read_weights(file: Path, title: str) -> tuple[str, str, dict[str, Tensor]]:
    """Reads a file of weights, or of a training, in the format of timm or torchvision.

    Returns:
        The prefix that DistributedDataParallel put before all keys, the entry that held the weights
        (averaged ones are preferred), and the weights without that prefix.

    Raises:
        UserError: it cannot be read, or holds other values among the weights.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "weights.pth"
    >>> torch.save({"model": {"module.fc.bias": torch.ones(1)}, "epoch": 3}, file)
    >>> read_weights(file, "the file")
    ('module.', 'model', {'fc.bias': tensor([1.])})
    """
    if file.suffix == ".safetensors":
        return "", "", read_safetensors(file)
    state = read_checkpoint(file, (argparse.Namespace,))
    wrapper = next((w for w in WRAPPERS if state.get(w) is not None), "state_dict")
    if isinstance(averaged := state.get(wrapper), dict):
        # torch.optim.swa_utils.AveragedModel counts its updates beside the weights.
        averaged.pop("n_averaged", None)
    prefix, weights = unwrap(state, wrapper, title)
    return prefix, wrapper, weights


def fitted(network: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a file as a network has them, as far as torch and timm know how.

    torch fills in counts of batches that files older than its release 0.4.1 lack. If the weights do
    not fit yet and the network is timm's, timm renames keys and resizes the positions of a ViT, as
    it does with a download. Whether they fit afterwards is left to :func:`misfits`.

    >>> layer = nn.BatchNorm1d(2)
    >>> old = {k: v for k, v in layer.state_dict().items() if k != "num_batches_tracked"}
    >>> fitted(layer, old)["num_batches_tracked"]
    tensor(0)
    """
    own = network.state_dict()
    found = {k: v for k, v in own.items() if k.endswith("num_batches_tracked")} | dict(weights)
    for kind in type(network).__mro__:
        if kind.__module__.startswith("timm.models."):
            fit = getattr(sys.modules[kind.__module__], "checkpoint_filter_fn", None)
            if fit is not None and misfits(network, found):
                # It fails in many ways on weights of another model, which do not fit then either.
                with contextlib.suppress(Exception):
                    return dict(fit(dict(found), network))
            break
    return found


class _WideResNet(ResNet):  # type: ignore[misc]
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
    """Builds a network without its classifier; the global random state stays the same.

    Args:
        name: torchvision's, optionally followed by ``w2`` to ``w5`` for SwAV's wide ResNets; or
            ``timm/`` and timm's name, or timm's name alone if torchvision has no such model.
        kwargs: arguments of its constructor.

    Raises:
        ConfigError: unknown name, or arguments that it does not take.

    >>> network = build_architecture("shufflenet_v2_x0_5", {}).eval()
    >>> network(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 1024])
    """
    wide = _WIDE.fullmatch(name)
    with _building(name, kwargs):
        if wide is not None:
            return _WideResNet(_BLOCKS[wide[1]], int(wide[2]), **kwargs)
        if name in _torchvision_names():
            model = torchvision.models.get_model(name, weights=None, **kwargs)
            return _without_classifier(model, name)[0]
        arguments = {"num_classes": 0, **kwargs}
        return timm.create_model(_timm_name(name), **arguments)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _building(name: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Restores the global random state, and reports arguments that a constructor refuses."""
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{KEY}.model_kwargs", dict(kwargs), f"{name} refuses it: {error}", "change or drop it"
        ) from error


def _torchvision_names() -> list[str]:
    return list(torchvision.models.list_models(module=torchvision.models))


def _timm_name(name: str) -> str:
    bare = name.removeprefix(PREFIX)
    if not timm.is_model(bare):
        known = timm.list_models() if name.startswith(PREFIX) else _torchvision_names()
        raise ConfigError(
            f"{KEY}.model",
            name,
            "unknown architecture",
            f"{suggest_name(bare, known)}; or timm/<model>",
        )
    return bare


def _without_classifier(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Replaces the last linear layer of a torchvision model; also returns the layer's name."""
    linears = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ConfigError(f"{KEY}.model", name, "it ends in no linear layer", "take another")
    model.set_submodule(linears[-1], nn.Identity())
    return model, linears[-1]


def image_side(kwargs: Mapping[str, Any], default: int = 224) -> int:
    """Side of a model's images in pixels: from the arguments of the model, else ``default``.

    >>> image_side({"img_size": [96, 96]}), image_side({})
    (96, 224)
    """
    side = kwargs.get("img_size", kwargs.get("image_size", default))
    return int(side[0] if isinstance(side, list | tuple) else side)
