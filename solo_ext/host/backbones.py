"""Adds every timm model to the host's backbones, as ``timm/<model>``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from omegaconf import OmegaConf
from timm.models import load_checkpoint
from torch import nn

from solo_ext.core.errors import ConfigError
from solo_ext.core.files import check_archive
from solo_ext.host.names import PREFIX, unknown_backbone

SMALL_SIDE = 64
"""Images of at most this side count as small: a stem that downsamples fourfold is too coarse."""


class BackboneTable(dict[str, Callable[..., nn.Module]]):
    """The host's table of backbones, which also contains every timm model.

    solo-learn main asserts membership before it looks up a name; the constructors in the table take
    the method's name first, then ``backbone.kwargs`` as keyword arguments.

    >>> "timm/resnet18" in BackboneTable(), "resnet18" in BackboneTable()
    (True, False)
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_timm(name))

    def __missing__(self, name: str) -> Callable[..., nn.Module]:
        if not is_timm(name):
            raise unknown_backbone(name, self)
        return partial(_create, name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (it is get itself)


def is_timm(name: str) -> bool:
    """Whether ``name`` is ``timm/`` and a model that timm can build (tags are allowed).

    >>> is_timm("timm/resnet18"), is_timm("resnet18")
    (True, False)
    """
    return name.startswith(PREFIX) and timm.is_model(name.removeprefix(PREFIX))


def small_image_kwargs(name: str, kwargs: Mapping[str, Any], image_size: int) -> dict[str, Any]:
    """Adds arguments for small images to those of a timm model; existing arguments are kept.

    Convolutional models get ``small_stem: true``; models that cut the image into patches get
    ``img_size`` and a patch size of an eighth of it, if they take both.

    Args:
        name: ``timm/<model>``; other names are returned as they are.
        kwargs: ``backbone.kwargs``.
        image_size: side of the large crops, in pixels.

    >>> small_image_kwargs("timm/resnet18", {}, 32)
    {'small_stem': True}
    >>> small_image_kwargs("timm/vit_tiny_patch16_224", {}, 32)
    {'img_size': 32, 'patch_size': 4}
    """
    done = dict(kwargs)
    if not is_timm(name) or image_size > SMALL_SIDE:
        return done
    config = timm.get_pretrained_cfg(name.removeprefix(PREFIX), allow_unregistered=True)
    if "patch_embed" not in str(getattr(config, "first_conv", None)):
        return {"small_stem": True, **done}
    fitted = {"img_size": image_size, "patch_size": max(2, image_size // 8), **done}
    try:
        # On the meta device nothing is allocated, and nothing downloaded without ``pretrained``.
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            _create(name, **{k: v for k, v in fitted.items() if k != "pretrained"})
    except Exception:
        return done
    return fitted


def build_backbone(
    table: Mapping[str, Callable[..., nn.Module]],
    name: str,
    kwargs: Mapping[str, Any],
    *,
    method: str | None,
    dataset: str,
) -> tuple[nn.Module, int]:
    """Builds a backbone (N, 3, H, W) -> (N, D) without classifier, as solo-learn's methods do.

    Args:
        table: constructors by name.
        name: solo-learn's name, or ``timm/<model>``.
        kwargs: arguments of the constructor.
        method: name of the method; main's vision transformers depend on it.
        dataset: ``cifar10`` and ``cifar100`` give solo-learn's own ResNets a 3 x 3 stem.

    Returns:
        The backbone, and D.

    Raises:
        ConfigError: an unknown backbone, or arguments that it does not take.

    >>> kwargs = {"small_stem": True}
    >>> backbone, dim = build_backbone(
    ...     BackboneTable(), "timm/resnet10t", kwargs, method=None, dataset="custom"
    ... )
    >>> backbone(torch.randn(2, 3, 32, 32)).shape, dim
    (torch.Size([2, 512]), 512)
    """
    if name not in table:
        raise unknown_backbone(name, table)
    try:
        backbone = table[name](method, **kwargs)
    except TypeError as error:
        raise ConfigError("backbone.kwargs", dict(kwargs), str(error), f"see {name}") from error
    if name.startswith("resnet"):
        features = int(backbone.inplanes)  # type: ignore[arg-type]
        backbone.fc = nn.Identity()
        if dataset in ("cifar10", "cifar100"):
            backbone.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=2, bias=False)
            backbone.maxpool = nn.Identity()
    else:
        features = int(backbone.num_features)  # type: ignore[arg-type]
    return backbone, features


def _create(full_name: str, method: str | None = None, **kwargs: Any) -> nn.Module:
    name = full_name.removeprefix(PREFIX)
    small = bool(kwargs.pop("small_stem", False))
    # timm takes plain tuples and mappings, but a config holds OmegaConf's.
    arguments: dict[str, Any] = {"num_classes": 0}
    for key, value in kwargs.items():
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        arguments[key] = tuple(plain) if isinstance(plain, list) else plain
    weights = arguments.pop("checkpoint_path", None)
    try:
        model = timm.create_model(name, **arguments)
        if weights:
            # Load the weights here: some versions of timm accept files that contain code. NumPy's
            # archives, as which the first ViTs were published, may be compressed.
            if not str(weights).lower().endswith(".npz"):
                check_archive(Path(weights))
            try:
                load_checkpoint(model, weights, weights_only=True)
            except RuntimeError as error:
                # A file that would run code is another RuntimeError, which says so itself.
                if "loading state_dict" not in str(error):
                    raise
                raise ConfigError(
                    "backbone.kwargs.checkpoint_path",
                    str(weights),
                    f"its tensors are not all and only those of {name}",
                    "give it as backbone.weights, which leaves a classifier out and resizes "
                    "positions",
                ) from None
    except TypeError as error:
        raise ConfigError("backbone.kwargs", arguments, str(error), f"see timm's {name}") from error
    # Models whose head has a hidden layer (MobileNetV3, VGG) return the output of that layer.
    model.num_features = getattr(model, "head_hidden_size", model.num_features)
    if small:
        _small_stem(model, name)
    return model


def _small_stem(model: nn.Module, name: str) -> None:
    """Makes the first convolution 3 x 3 with stride 1 and removes the max-pool, as for CIFAR."""
    path = getattr(model, "default_cfg", {}).get("first_conv")
    path = path[0] if isinstance(path, tuple | list) else path
    if not path or "patch_embed" in path:
        problem, remedy = "cuts images into patches", "set img_size and patch_size instead"
        raise ConfigError("backbone.kwargs.small_stem", True, f"timm's {name} {problem}", remedy)
    parent = model.get_submodule(path.rpartition(".")[0])
    old = model.get_submodule(path)
    assert isinstance(old, nn.Conv2d)
    sizes = old.in_channels, old.out_channels
    new = nn.Conv2d(*sizes, 3, stride=1, padding=1, bias=old.bias is not None)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    setattr(parent, path.rpartition(".")[2], new)
    if hasattr(model, "maxpool"):
        model.maxpool = nn.Identity()
