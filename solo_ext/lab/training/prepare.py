"""From a config to images and a method: all that is checked and filled in before a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from solo_ext import host
from solo_ext.config.check import check_method_kwargs, check_run
from solo_ext.config.schema import DALI, Data, Momentum, RunConfig
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.data.images import class_names, open_images
from solo_ext.data.reading import Images
from solo_ext.data.transforms import STATISTICS
from solo_ext.host.dali_loader import check_dali
from solo_ext.lab.evaluation.context import same_classes
from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS, check_builtin
from solo_ext.lab.training.checks import (
    check_backbone,
    check_batch_size,
    check_settings,
    checked_optimizer_kwargs,
)
from solo_ext.lab.training.cpu_precision import precision_for
from solo_ext.plugin import Unavailable, register

logger = logging.getLogger(__name__)

CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "imagenet": 1000, "imagenet100": 100}
BASE_BATCH = 256


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        run: the checked config, learning rates for batch 256; a resumed run reads this one.
        cfg: the config for methods, learning rates scaled.
        train: training images.
        val: validation images, or ``None``.
        method: the method's class.

    >>> images = [("an image", 0), ("another", 1)]
    >>> prepared = Prepared(RunConfig.model_construct(seed=5), DictConfig({}), images, None, object)
    >>> prepared.run.seed, len(prepared.train)
    (5, 2)
    """

    run: RunConfig
    cfg: DictConfig
    train: Images
    val: Images | None
    method: type[Any]


def prepare(config: Mapping[str, Any]) -> Prepared:
    """Checks a composed config against schema, host, method and data.

    Raises:
        ConfigError: anything that would fail, or silently do something else.
        UserError: solo-learn is missing.

    >>> from tempfile import mkdtemp
    >>> from PIL import Image
    >>> from solo_ext.config.compose import compose
    >>> root = Path(mkdtemp())
    >>> for number in range(4):
    ...     (root / str(number)).mkdir()
    ...     Image.new("RGB", (32, 32)).save(root / str(number) / "0.png")
    >>> words = [f"data.train_path={root}", "data.val_path=null", "optimizer.batch_size=2"]
    >>> prepared = prepare(compose("digits/debiased", [*words, "accelerator=cpu"]))
    >>> len(prepared.train), prepared.run.data.num_classes, prepared.cfg.optimizer.lr
    (4, 4, 0.00234375)
    """
    run = check_run(config)
    register()
    loaded = host.load()
    method = _method(loaded, run.method)
    kwargs_type = getattr(method, "kwargs_type", None) or BUILTIN_KWARGS.get(run.method)
    if kwargs_type is not None:
        run.method_kwargs = check_method_kwargs(kwargs_type, config.get("method_kwargs") or {})
    run.momentum = _momentum(run, method)
    backbone = check_backbone(loaded, run)
    if run.precision == "auto":
        run.precision = precision_for(run, backbone)
    check_settings(run)
    run.optimizer.kwargs = checked_optimizer_kwargs(run)
    _count_crops(run)
    check_folder("checkpoint.dir", run.checkpoint.dir)
    if run.data.format == "dali":
        run.dali = run.dali or DALI()
        check_dali(run)
    train = open_images(run.data, "train")
    without = run.data.val_path is None and run.data.holdout is None
    val = None if without else open_images(run.data, "val")
    run.data.num_classes = _count_classes(run.data, train)
    # Data sets of torchvision number their classes themselves.
    numbered = run.data.dataset in STATISTICS
    if val is not None and not numbered and not run.data.no_labels:
        same_classes(train, val, str(run.data.val_path))
    check_batch_size(run, len(train))
    check_builtin(run, len(train))
    cfg = _as_methods_take_it(run)
    if hasattr(method, "fill_sizes"):
        method.fill_sizes(cfg, len(train))
        filled: Any = OmegaConf.to_container(cfg.method_kwargs, resolve=True)
        run.method_kwargs = check_method_kwargs(method.kwargs_type, filled)
    if hasattr(method, "kwargs_type"):
        # The method refuses what it does not support before anything is built.
        cfg = method.add_and_assert_specific_cfg(cfg)
    return Prepared(run, cfg, train, val, method)


def check_folder(key: str, path: str) -> None:
    """Refuses a folder that cannot be created: a file is in its path, or a link that leads nowhere.

    Raises:
        ConfigError: with ``key``.

    >>> check_folder("checkpoint.dir", "/dev/null/runs")
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: checkpoint.dir='/dev/null/runs': '/dev/null' is no ...
    """
    place = Path(path)
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigError(key, path, f"{str(place)!r} is no folder", "name a folder")


def _as_methods_take_it(run: RunConfig) -> DictConfig:
    cfg = OmegaConf.create(run.model_dump())
    scale = cfg.optimizer.batch_size * run.world_size / BASE_BATCH
    cfg.optimizer.lr *= scale
    cfg.optimizer.classifier_lr *= scale
    if run.momentum is None:
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


def _momentum(run: RunConfig, method: type[Any]) -> Momentum | None:
    section = run.momentum
    if hasattr(method, "uses_momentum"):
        momentum = method.uses_momentum(run.method_kwargs)
    else:
        momentum = issubclass(method, host.BaseMomentumMethod)
    if not momentum:
        if section is not None:
            # solo-learn's own configs have the section for such methods too.
            logger.warning(f"momentum: {run.method} has no momentum backbone to read it")
        return None
    section = section or Momentum()
    if section.base_tau > section.final_tau:
        raise ConfigError(
            "momentum.base_tau",
            section.base_tau,
            f"above momentum.final_tau={section.final_tau}",
            "the average may only slow down: base_tau <= final_tau",
        )
    return section


def _count_classes(data: Data, train: Images) -> int:
    known, found = CLASSES.get(data.dataset), max(1, len(class_names(train)))
    if known is not None and found > known:
        raise ConfigError(
            "data.dataset",
            data.dataset,
            f"it has {known} classes, and the training images are of {found}",
            "use custom for images of your own",
        )
    return known or found


def _count_crops(run: RunConfig) -> None:
    size, all_crops = run.augmentations[0].crop_size, sum(a.num_crops for a in run.augmentations)
    large = sum(a.num_crops for a in run.augmentations if a.crop_size == size)
    run.data.num_large_crops, run.data.num_small_crops = large, all_crops - large
