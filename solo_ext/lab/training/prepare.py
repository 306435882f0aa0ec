"""Checks and completes a config before a run, and opens the images and the method it names."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from solo_ext import host
from solo_ext.config.check import check_method_kwargs, check_run, validated
from solo_ext.config.schema import DALI, OPTIMIZER_KWARGS, Data, Momentum, RandomErasing, RunConfig
from solo_ext.core.errors import ConfigError, first_line, suggest_name, unknown_name
from solo_ext.data.images import class_names, open_images
from solo_ext.data.reading import Images, targets_of, unwrap_dataset
from solo_ext.data.transforms import STATISTICS
from solo_ext.host.backbones import build_backbone, is_timm, small_image_kwargs
from solo_ext.host.dali_loader import check_dali
from solo_ext.host.names import PREFIX, unknown_backbone
from solo_ext.host.patches import OF_SCRIPTS, check_names
from solo_ext.lab.evaluation.context import same_classes, tell_of_seen_images
from solo_ext.lab.evaluation.online import default_protocols
from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS, check_builtin
from solo_ext.lab.training.cpu_precision import (
    Convolutions,
    precision_for,
    refuse_unwritten_gradients,
)
from solo_ext.lab.training.names import unknown_method
from solo_ext.lab.training.schedule import check_accumulation, tell_of_schedule
from solo_ext.plugin import Unavailable, register

logger = logging.getLogger(__name__)
A = TypeVar("A")
R = TypeVar("R")
CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "imagenet": 1000, "imagenet100": 100}
BASE_BATCH = 256
_FIXED = {"device", "dtype", "num_classes"}
"""Arguments of backbones that a config may not set, because the method decides them."""
_PER_IMAGE = ("rand_augment", "auto_augment", "random_erasing")


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        run: the checked config, with learning rates for a batch of 256; a resumed run reads it.
        cfg: the config that methods take, with learning rates scaled to the batch.
        method: the method's class.
        val: held-out images, for validation if they have labels; ``None`` if there are none.

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
        ConfigError: a setting that would fail, or silently have another effect.
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
    backbone = _check_backbone(loaded, run)
    if run.precision == "auto":
        run.precision = precision_for(run, backbone)
    refuse_unwritten_gradients(run, backbone)
    _check_settings(run)
    run.optimizer.kwargs = _checked_optimizer_kwargs(run)
    _count_crops(run)
    check_folder("checkpoint.dir", run.checkpoint.dir)
    if run.data.format == "dali":
        run.dali = run.dali or DALI()
        check_dali(run)
    train = open_images(run.data, "train")
    without = run.data.val_path is None and run.data.holdout is None
    val = None if without else open_images(run.data, "val")
    _tell_of_hidden(train, val if run.data.holdout is None else None)
    # Named here, so that the run's record says what it measures.
    protocols = run.online_eval.protocols or default_protocols(run.data)
    run.online_eval = run.online_eval.model_copy(update={"protocols": protocols})
    run.data.num_classes = _count_classes(run.data, train)
    # Data sets of torchvision number their classes themselves, so there is nothing to check.
    numbered = run.data.dataset in STATISTICS
    if val is not None and not (numbered or run.data.no_labels):
        same_classes(train, val, str(run.data.val_path))
    _check_labels(run, train)
    _check_batch_size(run, len(train))
    check_accumulation(run, len(train))
    check_builtin(run, len(train))
    cfg = _method_cfg(run)
    if hasattr(method, "fill_sizes"):
        method.fill_sizes(cfg, len(train))
        filled: Any = OmegaConf.to_container(cfg.method_kwargs, resolve=True)
        run.method_kwargs = check_method_kwargs(method.kwargs_type, filled)
    if hasattr(method, "kwargs_type"):
        # Here the method refuses what it does not support, before anything is built.
        cfg = method.add_and_assert_specific_cfg(cfg)
    return Prepared(run, cfg, train, val, method)


def tell_of(prepared: Prepared) -> None:
    """Warns of settings that are allowed and mean something else than they seem to.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> run = check_run(compose("digits/simclr", ["optimizer.batch_size=2"]))
    >>> tell_of(Prepared(run, DictConfig({}), [("an image", 0)] * 8, None, object))
    """
    tell_of_seen_images(prepared.run.data)
    tell_of_schedule(prepared.run, len(prepared.train))


def check_folder(key: str, path: str) -> None:
    """Refuses a folder that cannot be created, because its path has a file or a broken link.

    Raises:
        ConfigError: the folder cannot be created; the message names ``key``.

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


def _tell_of_hidden(*splits: Images | None) -> None:
    hidden = sum(getattr(unwrap_dataset(split, ())[0], "hidden", 0) for split in splits)
    if hidden:
        logger.info(f"hidden files among the images are passed over: {hidden}")


def _method_cfg(run: RunConfig) -> DictConfig:
    cfg = OmegaConf.create(run.model_dump())
    scale = cfg.optimizer.batch_size * run.world_size / BASE_BATCH
    cfg.optimizer.lr *= scale
    cfg.optimizer.classifier_lr *= scale
    if run.momentum is None:
        del cfg["momentum"]
    for aug in cfg.augmentations:
        # A null would override the default of solo-learn's main branch.
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
    raise unknown_method(name, usable, loaded.info.generation)


def _momentum(run: RunConfig, method: type[Any]) -> Momentum | None:
    section = run.momentum
    if hasattr(method, "uses_momentum"):
        momentum = method.uses_momentum(run.method_kwargs)
    else:
        momentum = issubclass(method, host.BaseMomentumMethod)
    if not momentum:
        if section is not None:
            # Only warn: solo-learn's own configs have the section for such methods too.
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


def _check_settings(run: RunConfig) -> None:
    """Refuses settings that contradict each other, or that a run would ignore."""
    check_names(run.patches)
    for name in OF_SCRIPTS:
        if name in run.patches:
            raise ConfigError(
                "patches",
                name,
                "it concerns solo-learn's own scripts",
                "leave it out: images are read by loaders of our own here",
            )
    if (run.auto_umap or {}).get("enabled"):
        raise ConfigError(
            "auto_umap.enabled",
            True,
            "maps are not drawn while training here",
            "use solo-learn's own main_pretrain.py for them, or remove it",
        )
    if run.scheduler.name == "step" and not run.scheduler.lr_decay_steps:
        raise ConfigError(
            "scheduler.lr_decay_steps",
            run.scheduler.lr_decay_steps,
            "scheduler.name=step needs the epochs at which the rate decays",
            "give a list such as [60, 80]",
        )
    _check_augmentation(run)


def _checked_optimizer_kwargs(run: RunConfig) -> dict[str, Any]:
    """``optimizer.kwargs``, checked and completed for ``optimizer.name``."""
    optimizer = run.optimizer
    name, known = optimizer.name, host.BaseMethod._OPTIMIZERS
    if name not in known:
        raise unknown_name("optimizer.name", name, "optimiser", known)
    if name not in OPTIMIZER_KWARGS:
        # A fork of solo-learn has added this optimiser.
        return optimizer.kwargs
    checked = validated(OPTIMIZER_KWARGS[name], optimizer.kwargs, prefix="optimizer.kwargs")
    kwargs: dict[str, Any] = checked.model_dump(exclude_none=True)
    if kwargs.get("nesterov") and (not kwargs["momentum"] or kwargs.get("dampening")):
        raise ConfigError(
            "optimizer.kwargs.nesterov",
            True,
            "it needs a momentum above 0 and no dampening",
            "set momentum, or leave nesterov out",
        )
    # Lightning cannot clip gradients with both a gradient scaler and a fused optimiser.
    scaled = str(run.precision).startswith("16")
    if name != "lars" and torch.cuda.is_available() and not run.on_cpu and not scaled:
        kwargs.setdefault("fused", True)
    return kwargs


def _check_augmentation(run: RunConfig) -> None:
    data = run.data
    on_batch, dali = data.augmentation == "batch", data.format == "dali"
    for place, pipeline in enumerate(run.augmentations):
        rrc, erasing = pipeline.rrc, pipeline.random_erasing or RandomErasing()
        for key, low, other, high in (
            ("rrc.crop_min_scale", rrc.crop_min_scale, "crop_max_scale", rrc.crop_max_scale),
            ("random_erasing.min_scale", erasing.min_scale, "max_scale", erasing.max_scale),
        ):
            if low > high:
                raise ConfigError(
                    f"augmentations.{place}.{key}",
                    low,
                    f"above {other}={high}",
                    f"allowed: a number above 0, up to {high}",
                )
        for name in _PER_IMAGE:
            policy = getattr(pipeline, name)
            if policy and (on_batch or dali):
                raise ConfigError(
                    f"augmentations.{place}.{name}",
                    policy.model_dump(),
                    "it works on single images, through torchvision",
                    "remove it, or take data.augmentation=image and a data.format other than dali",
                )
    if dali and on_batch:
        raise ConfigError(
            "data.augmentation", "batch", "DALI makes the crops itself", "take image with dali"
        )
    if dali and data.mix:
        raise ConfigError(
            "data.mix",
            data.mix.model_dump(),
            "DALI's batches are not mixed",
            "remove it, or take another data.format",
        )
    if data.in_memory and not on_batch:
        raise ConfigError(
            "data.in_memory",
            data.in_memory,
            "only data.augmentation=batch reads from memory",
            "take false, or data.augmentation=batch",
        )


def _check_batch_size(run: RunConfig, images: int) -> None:
    # The loaders cannot check this: they are created before the other processes exist.
    processes, size = run.world_size, run.optimizer.batch_size
    if images // processes < size:
        raise ConfigError(
            "optimizer.batch_size",
            size,
            f"the training set has {images // processes} images per process"
            + (f", {images} for {processes} processes" if processes > 1 else ""),
            "take a smaller batch",
        )


def _check_labels(run: RunConfig, train: Images) -> None:
    """Refuses images without label where a method takes labels for classes."""
    kwargs = run.method_kwargs
    learns = run.method == "supcon" or getattr(kwargs, "classes", None) == "label"
    if not learns or run.data.no_labels:
        return
    missing = sum(target < 0 for target in targets_of(train))
    if missing:
        # They would be one class of their own.
        raise ConfigError(
            "data.train_path",
            str(run.data.train_path),
            f"{missing} of {len(train)} images have no label, and {run.method} learns from labels",
            "give all of them one, or leave these images out",
        )


def _check_backbone(loaded: host.Host, run: RunConfig) -> Convolutions:
    """Completes the backbone's arguments, builds it, and runs it on every crop size.

    Returns its convolutions, each with the shape (C, H, W) of an input that it received.
    """
    name = run.backbone.name
    if name not in loaded.backbones:
        raise unknown_backbone(name, loaded.backbones)
    for key in _FIXED & run.backbone.kwargs.keys():
        value = run.backbone.kwargs[key]
        raise ConfigError(f"backbone.kwargs.{key}", value, "the method decides it", "remove it")
    if run.backbone.weights is not None:
        for key in ("pretrained", "checkpoint_path", "weights"):
            if value := run.backbone.kwargs.get(key):
                problem = "backbone.weights names other weights"
                raise ConfigError(f"backbone.kwargs.{key}", value, problem, "give one of them")
    sizes = [a.crop_size for a in run.augmentations]
    run.backbone.kwargs = small_image_kwargs(name, run.backbone.kwargs, sizes[0])
    # Leave out `pretrained`, so that weights are not downloaded twice.
    kwargs = {k: v for k, v in run.backbone.kwargs.items() if k != "pretrained"}

    def build(kwargs: Mapping[str, Any]) -> nn.Module:
        backbone, _ = build_backbone(
            loaded.backbones, name, kwargs, method=run.method, dataset=run.data.dataset
        )
        return backbone.eval()

    found: Convolutions = []

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Conv2d)
        found.append((layer, tuple(inputs[0].shape[1:])))

    def forward(size: int, kwargs: Mapping[str, Any]) -> None:
        backbone = build(kwargs)
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_pre_hook(note)
        backbone(torch.zeros(2, 3, size, size))

    try:
        built = _dry_run(build, kwargs)
    except Exception as error:
        if isinstance(error, ConfigError) and error.__cause__ is None:
            raise
        said = first_line(error.__cause__ or error)
        unknown = re.search(r"unexpected keyword argument '(\w+)'", said)
        if unknown and unknown[1] in kwargs:
            raise _unknown_argument(_dry_run(build, {}), unknown[1], kwargs) from error
        see = f"timm's {name.removeprefix(PREFIX)}" if is_timm(name) else name
        raise ConfigError("backbone.kwargs", kwargs, said, f"see what {see} takes") from error
    # Some of solo-learn's own backbones accept unknown arguments and ignore them.
    for key in kwargs if not is_timm(name) else ():
        if key not in inspect.signature(type(built).__init__).parameters:
            raise _unknown_argument(built, key, kwargs)

    def works(kwargs: Mapping[str, Any]) -> bool:
        found.clear()
        with contextlib.suppress(Exception):
            for size in sizes:
                _dry_run(partial(forward, kwargs=kwargs), size)
            return True
        return False

    for place, size in enumerate(sizes):
        try:
            _dry_run(partial(forward, kwargs=kwargs), size)
        except Exception as error:
            # Transformers are built for one size, 224 unless it is given.
            fitted = ({"img_size": sizes[0]}, {"img_size": sizes[0], "dynamic_img_size": True})
            more = next((more for more in fitted if works({**kwargs, **more})), None)
            if more is not None and not more.keys() & kwargs.keys():
                run.backbone.kwargs = {**run.backbone.kwargs, **more}
                break
            remedy = "give another, or make the backbone fit with backbone.kwargs"
            if more is not None:
                remedy = " ".join(["set", *(f"backbone.kwargs.{k}={v}" for k, v in more.items())])
            raise ConfigError(
                f"augmentations.{place}.crop_size",
                size,
                f"{name} cannot take it: {first_line(error)}",
                remedy,
            ) from error
    return found


def _dry_run(run: Callable[[A], R], argument: A) -> R:
    """Calls ``run`` silently, on the meta device if possible, without changing the random state."""
    held = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
            warnings.simplefilter("ignore")
            # Some models read values while they are built, but meta tensors have none.
            with contextlib.suppress(Exception), torch.device("meta"):
                return run(argument)
            return run(argument)
    finally:
        logging.disable(held)


def _unknown_argument(model: nn.Module, key: str, kwargs: Mapping[str, Any]) -> ConfigError:
    parameters = inspect.signature(type(model).__init__).parameters.values()
    valid = {p.name for p in parameters if p.default is not p.empty} | {"small_stem"}
    remedy = suggest_name(key, valid - _FIXED)
    return ConfigError(f"backbone.kwargs.{key}", kwargs[key], "unknown key", remedy)
