"""Refuses settings that would fail only after a run has started, each by a `ConfigError`."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from solo_ext import host
from solo_ext.config.check import validated
from solo_ext.config.schema import OPTIMIZER_KWARGS, RandomErasing, RunConfig, Scheduler
from solo_ext.core.errors import ConfigError, first_line, nearest
from solo_ext.host.backbones import (
    PREFIX,
    build_backbone,
    is_timm,
    small_image_kwargs,
    unknown_backbone,
)
from solo_ext.host.patches import OF_SCRIPTS, check_names
from solo_ext.lab.training.cpu_precision import Convolutions

A = TypeVar("A")
R = TypeVar("R")
_FIXED = {"device", "dtype", "num_classes"}
"""Arguments of models that a config may not set."""
_PER_IMAGE = ("rand_augment", "auto_augment", "random_erasing")


def check_supported(run: RunConfig) -> None:
    """Refuses settings that only solo-learn's own scripts support.

    >>> check_supported(RunConfig.model_construct(auto_umap={"enabled": True}))
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: auto_umap.enabled=true: maps are not drawn while ...
    """
    if (run.auto_umap or {}).get("enabled"):
        raise ConfigError(
            "auto_umap.enabled",
            True,
            "maps are not drawn while training here",
            "use solo-learn's own main_pretrain.py for them, or remove it",
        )


def check_patches(names: Sequence[str]) -> None:
    """Refuses unknown patches, and those of solo-learn's own scripts.

    >>> check_patches(["no-such-patch"])
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: patches='no-such-patch': unknown patch; allowed: ...
    """
    check_names(names)
    for name in names:
        if name in OF_SCRIPTS:
            raise ConfigError(
                "patches",
                name,
                "it concerns solo-learn's own scripts",
                "leave it out: images are read by loaders of our own here",
            )


def checked_optimizer_kwargs(run: RunConfig) -> dict[str, Any]:
    """``optimizer.kwargs``, checked and completed for the optimiser of that name.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> words = ["accelerator=cpu", "optimizer.name=sgd", "optimizer.kwargs={nesterov: true}"]
    >>> checked_optimizer_kwargs(check_run(compose("digits/simclr", words)))
    {'momentum': 0.9, 'nesterov': True}
    """
    optimizer = run.optimizer
    name, known = optimizer.name, host.BaseMethod._OPTIMIZERS
    if name not in known:
        raise ConfigError("optimizer.name", name, "unknown optimiser", nearest(name, known))
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
    # Lightning clips no gradients where a scaler and a fused optimiser meet.
    scaled = str(run.precision).startswith("16")
    if name != "lars" and torch.cuda.is_available() and not run.on_cpu and not scaled:
        kwargs.setdefault("fused", True)
    return kwargs


def check_scheduler(scheduler: Scheduler) -> None:
    """Refuses a stepwise schedule without steps.

    >>> check_scheduler(Scheduler(name="step"))
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: ...: scheduler.name=step needs the epochs at which ...
    """
    if scheduler.name == "step" and not scheduler.lr_decay_steps:
        raise ConfigError(
            "scheduler.lr_decay_steps",
            scheduler.lr_decay_steps,
            "scheduler.name=step needs the epochs at which the rate decays",
            "give a list such as [60, 80]",
        )


def check_augmentation(run: RunConfig) -> None:
    """Refuses settings that contradict each other, or that the chosen pipeline would ignore.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> words = ["data.in_memory=true", "data.augmentation=image"]
    >>> check_augmentation(check_run(compose("digits/simclr", words)))
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: data.in_memory=true: only data.augmentation=batch reads ...
    """
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
            True,
            "only data.augmentation=batch reads from memory",
            "take false, or data.augmentation=batch",
        )


def check_batch_size(run: RunConfig, images: int) -> None:
    """Refuses a batch larger than the images of a process.

    The loaders cannot check it: they are made before the other processes exist.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> run = check_run(compose("digits/simclr", ["optimizer.batch_size=64"]))
    >>> check_batch_size(run, images=50)
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: ...=64: the training set has 50 images per process; take a ...
    """
    processes, size = run.world_size, run.optimizer.batch_size
    if images // processes < size:
        raise ConfigError(
            "optimizer.batch_size",
            size,
            f"the training set has {images // processes} images per process"
            + (f", {images} for {processes} processes" if processes > 1 else ""),
            "take a smaller batch",
        )


def check_validation_interval(run: RunConfig, images: int) -> None:
    """Refuses ``val_check_interval`` above the number of batches of an epoch.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> words = ["optimizer.batch_size=64", "val_check_interval=30"]
    >>> run = check_run(compose("digits/simclr", words))
    >>> check_validation_interval(run, images=1400)
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: val_check_interval=30: an epoch has 21 batches; take ...
    """
    trainer = run.model_extra or {}
    every, limit = trainer.get("val_check_interval"), trainer.get("limit_train_batches")
    batches = images // run.world_size // run.optimizer.batch_size
    if limit is not None:
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if isinstance(every, int) and every > batches and trainer.get("check_val_every_n_epoch", 1):
        raise ConfigError(
            "val_check_interval",
            every,
            f"an epoch has {batches} batches",
            "take no more than that, a share of the epoch such as 0.5, or "
            "check_val_every_n_epoch=null",
        )


def check_backbone(loaded: host.Host, run: RunConfig) -> Convolutions:
    """Builds the backbone on the meta device and runs it on every crop size.

    Args:
        loaded: the host.
        run: the checked config; ``backbone.kwargs`` is completed for small images.

    Returns:
        Its convolutions, and the shape of the maps that each one met.

    Raises:
        ConfigError: unknown name or argument, or a crop size that the backbone cannot take.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> found = check_backbone(host.load(), check_run(compose("digits/simclr")))
    >>> layer, shape = found[0]
    >>> layer.in_channels, shape
    (3, (3, 32, 32))
    """
    name = run.backbone.name
    if name not in loaded.backbones:
        raise unknown_backbone(name, loaded.backbones)
    for key in _FIXED & run.backbone.kwargs.keys():
        raise ConfigError(
            f"backbone.kwargs.{key}",
            run.backbone.kwargs[key],
            "the method decides it",
            "remove it",
        )
    sizes = [a.crop_size for a in run.augmentations]
    run.backbone.kwargs = small_image_kwargs(name, run.backbone.kwargs, sizes[0])
    # Without `pretrained`, so that weights are not downloaded twice.
    kwargs = {k: v for k, v in run.backbone.kwargs.items() if k != "pretrained"}

    def build(kwargs: Mapping[str, Any]) -> nn.Module:
        backbone, _ = build_backbone(
            loaded.backbones,
            name,
            kwargs,
            method=run.method,
            dataset=run.data.dataset,
        )
        return backbone.eval()

    found: Convolutions = []

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Conv2d)
        found.append((layer, tuple(inputs[0].shape[1:])))

    def forward(size: int) -> None:
        backbone = build(kwargs)
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_pre_hook(note)
        backbone(torch.zeros(2, 3, size, size))

    try:
        built = _dry(build, kwargs)
    except Exception as error:
        said = first_line(error.__cause__ or error)
        unknown = re.search(r"unexpected keyword argument '(\w+)'", said)
        if unknown and unknown[1] in kwargs:
            raise _unknown_argument(_dry(build, {}), unknown[1], kwargs) from error
        see = f"timm's {name.removeprefix(PREFIX)}" if is_timm(name) else name
        raise ConfigError("backbone.kwargs", kwargs, said, f"see what {see} takes") from error
    # Some of solo-learn's own backbones accept any argument and ignore it.
    for key in kwargs if not is_timm(name) else ():
        if key not in inspect.signature(type(built).__init__).parameters:
            raise _unknown_argument(built, key, kwargs)
    for place, size in enumerate(sizes):
        try:
            _dry(forward, size)
        except Exception as error:
            raise ConfigError(
                f"augmentations.{place}.crop_size",
                size,
                f"{name} cannot take it: {first_line(error)}",
                "give another, or make the backbone fit with backbone.kwargs",
            ) from error
    return found


def _dry(run: Callable[[A], R], argument: A) -> R:
    """Calls ``run`` on the meta device if possible, silently, and keeps the random state."""
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
    remedy = nearest(key, valid - _FIXED, show=40)
    return ConfigError(f"backbone.kwargs.{key}", kwargs[key], "unknown key", remedy)
