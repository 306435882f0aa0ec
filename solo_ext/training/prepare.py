"""Everything that is checked and filled in before a run starts."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter
from torch import nn

from solo_ext import host
from solo_ext.config.check import check_method_kwargs, check_run, validated
from solo_ext.config.hardware import check_hardware, world_size
from solo_ext.config.schema import OPTIMIZER_KWARGS
from solo_ext.data.datasets import Images, class_names, open_images
from solo_ext.errors import ConfigError, nearest
from solo_ext.evaluation.evaluate import same_classes
from solo_ext.host.backbones import (
    PREFIX,
    build_backbone,
    is_timm,
    small_image_kwargs,
    unknown_backbone,
)
from solo_ext.plugin import register

CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "imagenet": 1000, "imagenet100": 100}
BASE_BATCH = 256
A = TypeVar("A")
R = TypeVar("R")
_FIXED = {"device", "dtype", "num_classes"}
"""Arguments of models that are not a config's to set."""
_QUEUED = ("all4one", "mocov2plus", "nnbyol", "nnclr", "nnsiam", "ressl")


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        given: the config as checked, learning rates for batch 256; what a resumed run reads.
        cfg: the config as methods take it, learning rates scaled.
        train: training images.
        val: validation images, or ``None``.
        method: the class.
    """

    given: dict[str, Any]
    cfg: DictConfig
    train: Images
    val: Images | None
    method: type[Any]


def prepare(config: Mapping[str, Any]) -> Prepared:
    """Checks a composed config against schema, host, method and data.

    Args:
        config: a plain mapping such as :func:`solo_ext.config.compose.compose` gives.

    Raises:
        ConfigError: anything that would fail or silently do something else.
        HostError: solo-learn is missing.
    """
    given = check_run(config)
    check_hardware(given)
    register()
    loaded = host.load()
    method = _method(loaded, given["method"])
    given["method_kwargs"] = _method_kwargs(given, method)
    given["momentum"] = _momentum(given, method)
    _backbone(loaded, given)
    _refuse_the_unsupported(given)
    given["optimizer"]["kwargs"] = _optimizer_kwargs(given["optimizer"])
    _scheduler(given["scheduler"])
    _count_crops(given)
    check_folder("checkpoint.dir", given["checkpoint"]["dir"])
    _no_files(given["data"])
    train = open_images(given["data"], "train")
    val = None if given["data"]["val_path"] is None else open_images(given["data"], "val")
    given["data"]["num_classes"] = CLASSES.get(given["data"]["dataset"]) or max(
        1, len(class_names(train))
    )
    if val is not None and given["data"]["dataset"] == "custom" and not given["data"]["no_labels"]:
        same_classes(train, val, given["data"]["val_path"])
    _needs_of_builtins(given, len(train))
    _validation_interval(given, len(train))
    return Prepared(given, _as_methods_take_it(given), train, val, method)


def check_folder(key: str, path: str) -> None:
    """Refuses a folder that cannot be made because a file is in the way.

    Raises:
        ConfigError: naming ``key``.
    """
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigError(key, path, f"{str(place)!r} is a file", "name a folder")


def _as_methods_take_it(given: dict[str, Any]) -> DictConfig:
    cfg = OmegaConf.create(given)
    scale = cfg.optimizer.batch_size * world_size(given) / BASE_BATCH
    cfg.optimizer.lr *= scale
    cfg.optimizer.classifier_lr *= scale
    if given["momentum"] is None:
        del cfg["momentum"]
    for aug in cfg.augmentations:
        # main reads these with a default of its own, which a null would hide.
        for key in ("mean", "std"):
            if aug[key] is None:
                del aug[key]
    return cfg


def _method(loaded: host.Host, name: str) -> type[Any]:
    usable = {n: m for n, m in loaded.methods.items() if n not in ("base", "linear")}
    if name in usable:
        return usable[name]
    if name in host.BUILTIN_KWARGS:
        raise ConfigError(
            "method",
            name,
            f"solo-learn {loaded.info.generation} does not have it, only its main branch does",
            "put a checkout of main on PYTHONPATH, or choose another method",
        )
    raise ConfigError("method", name, "unknown method", nearest(name, usable, show=40))


def _method_kwargs(given: dict[str, Any], method: type[Any]) -> dict[str, Any]:
    kwargs_type = getattr(method, "kwargs_type", None) or host.BUILTIN_KWARGS.get(given["method"])
    if kwargs_type is None:
        return dict(given["method_kwargs"])
    return check_method_kwargs(kwargs_type, given["method_kwargs"])


def _momentum(given: dict[str, Any], method: type[Any]) -> dict[str, Any] | None:
    from solo_ext.config.schema import Momentum

    section: dict[str, Any] | None = given["momentum"]
    if not issubclass(method, host.BaseMomentumMethod):
        if section is not None:
            raise ConfigError(
                "momentum",
                section,
                f"{given['method']} has no momentum backbone",
                "remove the section, on the command line with ~momentum",
            )
        return None
    section = section or Momentum().model_dump()
    if section["base_tau"] > section["final_tau"]:
        raise ConfigError(
            "momentum.base_tau",
            section["base_tau"],
            f"above momentum.final_tau={section['final_tau']}",
            "the average may only slow down: base_tau <= final_tau",
        )
    return section


def _backbone(loaded: host.Host, given: dict[str, Any]) -> None:
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


def _refuse_the_unsupported(given: Mapping[str, Any]) -> None:
    if (given["auto_umap"] or {}).get("enabled"):
        raise ConfigError(
            "auto_umap.enabled",
            True,
            "maps are not drawn while training here",
            "use solo-learn's own main_pretrain.py for them, or remove it",
        )


def _optimizer_kwargs(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    adapter = TypeAdapter(OPTIMIZER_KWARGS[optimizer["name"]])
    checked = validated(adapter, optimizer["kwargs"], prefix="optimizer.kwargs")
    kwargs: dict[str, Any] = checked.model_dump(exclude_none=True)
    if kwargs.get("nesterov") and (not kwargs["momentum"] or kwargs.get("dampening")):
        raise ConfigError(
            "optimizer.kwargs.nesterov",
            True,
            "it needs a momentum above 0 and no dampening",
            "set momentum, or leave nesterov out",
        )
    return kwargs


def _scheduler(scheduler: Mapping[str, Any]) -> None:
    if scheduler["name"] == "step" and not scheduler["lr_decay_steps"]:
        raise ConfigError(
            "scheduler.lr_decay_steps",
            scheduler["lr_decay_steps"],
            "scheduler.name=step needs the epochs at which the rate decays",
            "give a list such as [60, 80]",
        )


def _no_files(data: Mapping[str, Any]) -> None:
    for key in ("train_path", "val_path"):
        if data[key] is not None and Path(data[key]).expanduser().is_file():
            raise ConfigError(
                f"data.{key}", data[key], "a file, not a folder", "give the folder of the images"
            )


def _needs_of_builtins(given: Mapping[str, Any], images: int) -> None:
    """What solo-learn's methods would only find out while they train."""
    method, kwargs = given["method"], given["method_kwargs"]
    batch = given["optimizer"]["batch_size"]
    joined = batch * world_size(given)

    def refuse(key: str, problem: str, remedy: str) -> None:
        raise ConfigError(f"method_kwargs.{key}", kwargs[key], problem, remedy)

    if method in _QUEUED and kwargs["queue_size"] % joined:
        below = kwargs["queue_size"] // joined * joined
        refuse(
            "queue_size",
            f"no multiple of the batch, {joined} over all processes",
            f"allowed: multiples of it such as {below or joined}, {(below or joined) + joined}",
        )
    if method == "swav" and 0 < kwargs["queue_size"] < joined:
        refuse("queue_size", f"smaller than the batch, {joined} over all processes", "or take 0")
    if method == "wmse":
        if given["data"]["num_large_crops"] < 2:
            raise ConfigError("augmentations", "1 large crop", "wmse compares two or more", "")
        size = kwargs["whitening_size"]
        if batch % size:
            refuse("whitening_size", f"does not divide the batch of {batch}", "take a divisor")
        if size <= kwargs["proj_output_dim"] and not kwargs["whitening_eps"]:
            refuse(
                "whitening_size",
                f"too few to whiten {kwargs['proj_output_dim']} dimensions",
                "take more than method_kwargs.proj_output_dim, or a whitening_eps above 0",
            )
    if method == "deepclusterv2":
        clustered = images // joined * batch
        if not kwargs["num_prototypes"] or max(kwargs["num_prototypes"]) > clustered > 0:
            refuse(
                "num_prototypes",
                f"{clustered} images of each process are clustered",
                f"give a list of numbers up to {clustered}",
            )
    if method == "dino" and kwargs["warmup_teacher_temperature_epochs"] > given["max_epochs"]:
        refuse(
            "warmup_teacher_temperature_epochs",
            f"longer than the run, max_epochs={given['max_epochs']}",
            f"allowed: up to {given['max_epochs']}",
        )
    if method == "mae" and not given["backbone"]["name"].startswith("vit_"):
        raise ConfigError(
            "backbone.name",
            given["backbone"]["name"],
            "mae needs solo-learn's own vision transformers",
            "allowed: vit_tiny, vit_small, vit_base, vit_large",
        )
    if method == "supcon" and given["data"]["no_labels"]:
        raise ConfigError(
            "data.no_labels", True, "supcon learns from labels", "give class folders, or simclr"
        )


def _validation_interval(given: Mapping[str, Any], images: int) -> None:
    every, limit = given.get("val_check_interval"), given.get("limit_train_batches")
    batches = images // world_size(given) // given["optimizer"]["batch_size"]
    if limit is not None:
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if isinstance(every, int) and every > batches and given.get("check_val_every_n_epoch", 1):
        raise ConfigError(
            "val_check_interval",
            every,
            f"an epoch has {batches} batches",
            "take no more than that, a share of the epoch such as 0.5, or "
            "check_val_every_n_epoch=null",
        )


def _count_crops(given: dict[str, Any]) -> None:
    sizes = [a["crop_size"] for a in given["augmentations"]]
    counts = [a["num_crops"] for a in given["augmentations"]]
    for place, a in enumerate(given["augmentations"]):
        low, high = a["rrc"]["crop_min_scale"], a["rrc"]["crop_max_scale"]
        if low > high:
            raise ConfigError(
                f"augmentations.{place}.rrc.crop_min_scale",
                low,
                f"above crop_max_scale={high}",
                f"allowed: a number above 0, up to {high}",
            )
    large = sum(c for s, c in zip(sizes, counts, strict=True) if s == sizes[0])
    given["data"]["num_large_crops"] = large
    given["data"]["num_small_crops"] = sum(counts) - large
    if large != 2 and given["method"] not in ("wmse", "mae"):
        own = getattr(host.load().methods[given["method"]], "kwargs_type", None)
        if own is None:
            raise ConfigError(
                "augmentations",
                f"{large} large crops",
                f"{given['method']} of solo-learn takes two",
                "give num_crops: 2 in all, of one crop_size",
            )
