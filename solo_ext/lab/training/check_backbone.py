"""Whether a backbone can be built, and takes the crops, found out before a run starts."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from solo_ext import host
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.host.backbones import (
    PREFIX,
    build_backbone,
    is_timm,
    small_image_kwargs,
    unknown_backbone,
)

A = TypeVar("A")
R = TypeVar("R")
_FIXED = {"device", "dtype", "num_classes"}
"""Arguments of models that are not a config's to set."""


def check_backbone(loaded: host.Host, given: dict[str, Any]) -> None:
    """Builds the backbone on the meta device and runs it on every crop size.

    Args:
        loaded: the host.
        given: the checked config; ``backbone.kwargs`` is completed for small images.

    Raises:
        ConfigError: unknown name or argument, or a crop size that the backbone cannot take.
    """
    name = given["backbone"]["name"]
    if name not in loaded.backbones:
        raise unknown_backbone(name, loaded.backbones)
    sizes = [a["crop_size"] for a in given["augmentations"]]
    given["backbone"]["kwargs"] = small_image_kwargs(name, given["backbone"]["kwargs"], sizes[0])
    # Weights are not downloaded twice.
    kwargs = {k: v for k, v in given["backbone"]["kwargs"].items() if k != "pretrained"}

    def build(kwargs: Mapping[str, Any]) -> nn.Module:
        backbone, _ = build_backbone(
            loaded.backbones,
            name,
            kwargs,
            method=given["method"],
            dataset=given["data"]["dataset"],
        )
        return backbone.eval()

    def run(size: int) -> None:
        build(kwargs)(torch.zeros(2, 3, size, size))

    try:
        built = _dry(build, kwargs)
    except Exception as error:
        raise _backbone_mistake(name, kwargs, build, error) from error
    # Some of solo-learn's own take any argument and drop it.
    for key in kwargs if not is_timm(name) else ():
        if key not in _arguments(built):
            raise _unknown_argument(name, built, key, kwargs[key])
    for place, size in enumerate(sizes):
        try:
            _dry(run, size)
        except Exception as error:
            raise ConfigError(
                f"augmentations.{place}.crop_size",
                size,
                f"{name} cannot take it: {_first_line(error)}",
                "give another, or make the backbone fit with backbone.kwargs",
            ) from error


def _dry(run: Callable[[A], R], argument: A) -> R:
    """Runs without memory or time where that is possible, without noise or trace in any case."""
    held = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
            warnings.simplefilter("ignore")
            # Some models look at values while they are built, which meta tensors do not have.
            with contextlib.suppress(Exception), torch.device("meta"):
                return run(argument)
            return run(argument)
    finally:
        logging.disable(held)


def _backbone_mistake(
    name: str,
    kwargs: Mapping[str, Any],
    build: Callable[[Mapping[str, Any]], nn.Module],
    error: Exception,
) -> ConfigError:
    """Finds the argument without which the backbone can be built."""
    text = _first_line(error.__cause__ or error)
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    for key in [unknown[1]] if unknown and unknown[1] in kwargs else list(kwargs):
        with contextlib.suppress(Exception):
            model = _dry(build, {k: v for k, v in kwargs.items() if k != key})
            if not unknown:
                return ConfigError(
                    f"backbone.kwargs.{key}",
                    kwargs[key],
                    f"{name} refuses it: {text}",
                    "change or remove it",
                )
            return _unknown_argument(name, model, key, kwargs[key])
    if unknown:
        return ConfigError(
            f"backbone.kwargs.{unknown[1]}", kwargs.get(unknown[1]), f"{name} does not take it"
        )
    see = f"timm's {name.removeprefix(PREFIX)}" if is_timm(name) else name
    return ConfigError("backbone.kwargs", kwargs, text, f"see what {see} takes")


def _unknown_argument(name: str, model: nn.Module, key: str, value: Any) -> ConfigError:
    valid = {n for n, p in _arguments(model).items() if p.default is not p.empty}
    valid |= {"small_stem"} if is_timm(name) else set()
    remedy = nearest(key, valid - _FIXED, show=40)
    return ConfigError(f"backbone.kwargs.{key}", value, "unknown key", remedy)


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(model).__init__).parameters


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
