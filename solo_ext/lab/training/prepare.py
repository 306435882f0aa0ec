"""From a config to images and a method: all that is checked and filled in before a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from solo_ext import host
from solo_ext.config.check import check_method_kwargs, check_run
from solo_ext.config.hardware import check_hardware, world_size
from solo_ext.config.schema import DALI, Momentum
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.data.images import class_names, open_images
from solo_ext.data.reading import Images
from solo_ext.data.transforms import STATISTICS
from solo_ext.host.dali_loader import check_dali
from solo_ext.lab.evaluation.context import same_classes
from solo_ext.lab.training.builtin_methods import (
    BUILTIN_KWARGS,
    check_builtin,
    check_large_crops,
)
from solo_ext.lab.training.checks import (
    check_augmentation,
    check_backbone,
    check_batch_size,
    check_patches,
    check_scheduler,
    check_supported,
    check_validation_interval,
    checked_optimizer_kwargs,
)
from solo_ext.plugin import Unavailable, register

logger = logging.getLogger(__name__)

CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "imagenet": 1000, "imagenet100": 100}
BASE_BATCH = 256


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        given: the checked config, learning rates for batch 256; a resumed run reads this one.
        cfg: the config for methods, learning rates scaled.
        train: training images.
        val: validation images, or ``None``.
        method: the method's class.
    """

    given: dict[str, Any]
    cfg: DictConfig
    train: Images
    val: Images | None
    method: type[Any]


def prepare(config: Mapping[str, Any]) -> Prepared:
    """Checks a composed config against schema, host, method and data.

    Args:
        config: a plain mapping, for example from :func:`solo_ext.config.compose.compose`.

    Raises:
        ConfigError: anything that would fail, or silently do something else.
        HostError: solo-learn is missing.
    """
    given = check_run(config)
    check_hardware(given)
    register()
    loaded = host.load()
    method = _method(loaded, given["method"])
    check_patches(given["patches"])
    given["method_kwargs"] = _method_kwargs(given, method)
    given["momentum"] = _momentum(given, method)
    check_backbone(loaded, given)
    check_supported(given)
    given["optimizer"]["kwargs"] = checked_optimizer_kwargs(given["optimizer"])
    check_scheduler(given["scheduler"])
    check_augmentation(given)
    _count_crops(given)
    check_folder("checkpoint.dir", given["checkpoint"]["dir"])
    if given["data"]["format"] == "dali":
        given["dali"] = given["dali"] or DALI().model_dump()
        check_dali(given)
    train = open_images(given["data"], "train")
    without = given["data"]["val_path"] is None and given["data"]["holdout"] is None
    val = None if without else open_images(given["data"], "val")
    given["data"]["num_classes"] = _count_classes(given["data"], train)
    # Data sets of torchvision number their classes themselves.
    numbered = given["data"]["dataset"] in STATISTICS
    if val is not None and not numbered and not given["data"]["no_labels"]:
        same_classes(train, val, given["data"]["val_path"])
    check_batch_size(given, len(train))
    check_builtin(given, len(train))
    check_validation_interval(given, len(train))
    cfg = _as_methods_take_it(given)
    if hasattr(method, "fill_sizes"):
        method.fill_sizes(cfg, len(train))
        given["method_kwargs"] = OmegaConf.to_container(cfg.method_kwargs, resolve=True)
    if hasattr(method, "kwargs_type"):
        # The method refuses what it does not support before anything is built.
        cfg = method.add_and_assert_specific_cfg(cfg)
    if hasattr(method, "check_size"):
        method.check_size(cfg, len(train))
    return Prepared(given, cfg, train, val, method)


def check_folder(key: str, path: str) -> None:
    """Refuses a folder that cannot be created because a file is in its path.

    Raises:
        ConfigError: with ``key``.
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
        # A null would hide main's own default.
        for key in ("mean", "std"):
            if aug[key] is None:
                del aug[key]
    return cfg


def _method(loaded: host.Host, name: str) -> type[Any]:
    usable = {n: m for n, m in loaded.methods.items() if n not in ("base", "linear")}
    if name in usable:
        if isinstance(usable[name], Unavailable):
            usable[name]()
        return usable[name]
    if name in BUILTIN_KWARGS:
        raise ConfigError(
            "method",
            name,
            f"solo-learn {loaded.info.generation} does not have it, only its main branch does",
            "put a checkout of main on PYTHONPATH, or choose another method",
        )
    raise ConfigError("method", name, "unknown method", nearest(name, usable, show=40))


def _method_kwargs(given: dict[str, Any], method: type[Any]) -> dict[str, Any]:
    kwargs_type = getattr(method, "kwargs_type", None) or BUILTIN_KWARGS.get(given["method"])
    if kwargs_type is None:
        return dict(given["method_kwargs"])
    return check_method_kwargs(kwargs_type, given["method_kwargs"])


def _momentum(given: dict[str, Any], method: type[Any]) -> dict[str, Any] | None:
    section: dict[str, Any] | None = given["momentum"]
    if hasattr(method, "uses_momentum"):
        momentum = method.uses_momentum(given["method_kwargs"])
    else:
        momentum = issubclass(method, host.BaseMomentumMethod)
    if not momentum:
        if section is not None:
            # solo-learn's own configs have the section for such methods too.
            logger.warning(f"momentum: {given['method']} has no momentum backbone to read it")
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


def _count_classes(data: Mapping[str, Any], train: Images) -> int:
    known, found = CLASSES.get(data["dataset"]), max(1, len(class_names(train)))
    if known is not None and found > known:
        raise ConfigError(
            "data.dataset",
            data["dataset"],
            f"it has {known} classes, and the training images are of {found}",
            "use custom for images of your own",
        )
    return known or found


def _count_crops(given: dict[str, Any]) -> None:
    sizes = [a["crop_size"] for a in given["augmentations"]]
    counts = [a["num_crops"] for a in given["augmentations"]]
    large = sum(c for s, c in zip(sizes, counts, strict=True) if s == sizes[0])
    given["data"]["num_large_crops"] = large
    given["data"]["num_small_crops"] = sum(counts) - large
    check_large_crops(given["method"], large)
