"""Everything that is checked and filled in before a run starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter

from solo_ext import host
from solo_ext.config.check import check_method_kwargs, check_run, validated
from solo_ext.config.hardware import check_hardware, world_size
from solo_ext.config.schema import DALI, OPTIMIZER_KWARGS, Momentum
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.data.datasets import class_names, open_images
from solo_ext.data.images import Images
from solo_ext.data.transforms import STATISTICS
from solo_ext.host.dali_loader import check_dali
from solo_ext.host.patches import OF_SCRIPTS, check_names
from solo_ext.lab.evaluation.context import same_classes
from solo_ext.lab.training.check_augmentation import check_augmentation
from solo_ext.lab.training.check_backbone import check_backbone
from solo_ext.lab.training.check_builtin import check_builtin, check_large_crops
from solo_ext.plugin import Unavailable, register

logger = logging.getLogger(__name__)

CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "imagenet": 1000, "imagenet100": 100}
BASE_BATCH = 256


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
    _patches(given["patches"])
    given["method_kwargs"] = _method_kwargs(given, method)
    given["momentum"] = _momentum(given, method)
    check_backbone(loaded, given)
    _refuse_the_unsupported(given)
    given["optimizer"]["kwargs"] = _optimizer_kwargs(given["optimizer"])
    _scheduler(given["scheduler"])
    _count_crops(given)
    check_augmentation(given)
    check_folder("checkpoint.dir", given["checkpoint"]["dir"])
    if given["data"]["format"] == "dali":
        given["dali"] = given["dali"] or DALI().model_dump()
        check_dali(given)
    train = open_images(given["data"], "train")
    without = given["data"]["val_path"] is None and given["data"]["holdout"] is None
    val = None if without else open_images(given["data"], "val")
    given["data"]["num_classes"] = _count_classes(given["data"], train)
    # torchvision's archives number their classes themselves.
    numbered = given["data"]["dataset"] in STATISTICS
    if val is not None and not numbered and not given["data"]["no_labels"]:
        same_classes(train, val, given["data"]["val_path"])
    _fill_a_batch(given, len(train))
    check_builtin(given, len(train))
    _validation_interval(given, len(train))
    cfg = _as_methods_take_it(given)
    if hasattr(method, "fill_sizes"):
        method.fill_sizes(cfg, len(train))
        given["method_kwargs"] = OmegaConf.to_container(cfg.method_kwargs, resolve=True)
    if hasattr(method, "kwargs_type"):
        # What the method itself refuses, before anything is built.
        cfg = method.add_and_assert_specific_cfg(cfg)
    if hasattr(method, "check_size"):
        method.check_size(cfg, len(train))
    return Prepared(given, cfg, train, val, method)


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
        if isinstance(usable[name], Unavailable):
            usable[name]()
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
    section: dict[str, Any] | None = given["momentum"]
    uses_momentum = getattr(method, "uses_momentum", None)
    if not issubclass(method, host.BaseMomentumMethod) or (
        uses_momentum is not None and not uses_momentum(given["method_kwargs"])
    ):
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


def _refuse_the_unsupported(given: Mapping[str, Any]) -> None:
    if (given["auto_umap"] or {}).get("enabled"):
        raise ConfigError(
            "auto_umap.enabled",
            True,
            "maps are not drawn while training here",
            "use solo-learn's own main_pretrain.py for them, or remove it",
        )


def _patches(names: Sequence[str]) -> None:
    check_names(names)
    for name in names:
        if name in OF_SCRIPTS:
            raise ConfigError(
                "patches",
                name,
                "it concerns solo-learn's own scripts",
                "leave it out: images are read by loaders of our own here",
            )


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


def _optimizer_kwargs(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    name, known = optimizer["name"], host.BaseMethod._OPTIMIZERS
    if name not in known:
        raise ConfigError("optimizer.name", name, "unknown optimiser", nearest(name, known))
    if name not in OPTIMIZER_KWARGS:
        # One that a fork of solo-learn has added.
        return dict(optimizer["kwargs"])
    adapter = TypeAdapter(OPTIMIZER_KWARGS[name])
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


def _fill_a_batch(given: Mapping[str, Any], images: int) -> None:
    # The loaders, made before the other processes are there, see one process only.
    processes, size = world_size(given), given["optimizer"]["batch_size"]
    if images // processes < size:
        raise ConfigError(
            "optimizer.batch_size",
            size,
            f"the training set has {images // processes} images per process"
            + (f", {images} for {processes} processes" if processes > 1 else ""),
            "take a smaller batch",
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
    check_large_crops(given["method"], large)
