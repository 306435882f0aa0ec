"""Networks without classifier by the names of torchvision and timm, for weights out of files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

from solo_ext.core.errors import ConfigError, nearest
from solo_ext.pretrained.teacher_source import KEY

TIMM = "timm/"
_WIDE = re.compile(r"(resnet(?:50|101|152))w([2-5])")
_BLOCKS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3], "resnet152": [3, 8, 36, 3]}


class WideResNet(ResNet):  # type: ignore[misc]
    """ResNet of bottlenecks with every layer ``width`` times as wide, as SwAV's w2, w4 and w5.

    torchvision's ``wide_resnet50_2`` is another: there the inner convolutions alone are wider.
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
    """Builds a network without its classifier; the global random state is left alone.

    Args:
        name: of torchvision, with ``w2`` to ``w5`` behind it for SwAV's wide ResNets; ``timm/``
            and a name of timm's, or that name alone where torchvision has no such model.
        kwargs: arguments of its constructor.

    Raises:
        ConfigError: unknown name, or arguments that it does not take.
    """
    wide = _WIDE.fullmatch(name)
    with building(name, kwargs):
        if wide is not None:
            return WideResNet(_BLOCKS[wide[1]], int(wide[2]), **kwargs)
        if name in torchvision_names():
            return without_classifier(torchvision_model(name, kwargs), name)[0]
        model = timm_name(name)
        return timm.create_model(model, num_classes=0, **kwargs)  # type: ignore[no-any-return]


@contextlib.contextmanager
def building(name: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Keeps the global random state, and says which arguments a constructor refused."""
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{KEY}.model_kwargs", dict(kwargs), f"{name} refuses it: {error}", "change or drop it"
        ) from error


def torchvision_names() -> list[str]:
    """torchvision's models for images."""
    return list(torchvision.models.list_models(module=torchvision.models))


def torchvision_model(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """A model of torchvision, weights not loaded, with its classifier."""
    # Their default is a slow initialisation, about which they warn.
    fast = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **{**fast, **kwargs})
    return model


def timm_name(name: str) -> str:
    """The name for ``timm.create_model``.

    Raises:
        ConfigError: timm has no such model.
    """
    bare = name.removeprefix(TIMM)
    if not timm.is_model(bare):
        known = timm.list_models() if name.startswith(TIMM) else torchvision_names()
        raise ConfigError(
            f"{KEY}.model", name, "unknown architecture", f"{nearest(bare, known)}; or timm/<model>"
        )
    return bare


def without_classifier(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Takes the last linear layer of a torchvision model away.

    Returns:
        The model, and the name of the layer.

    Raises:
        ConfigError: there is none.
    """
    linears = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ConfigError(f"{KEY}.model", name, "it ends in no linear layer", "take another")
    model.set_submodule(linears[-1], nn.Identity())
    return model, linears[-1]
