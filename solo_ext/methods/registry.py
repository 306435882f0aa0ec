"""The table of methods, and functions that check and complete their settings.

Settings are in ``cfg.method_kwargs``: :func:`fill_method_kwargs` checks them,
:func:`fill_from_data` replaces null sizes by defaults computed from the number of training images,
:func:`typed_kwargs` converts them to the method's settings class. :func:`example_config` makes a
config for trying a method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from solo_ext.core.errors import ConfigError
from solo_ext.core.registry import Registry
from solo_ext.core.types import Section

logger = logging.getLogger("solo_ext.methods")
METHODS: Registry[Any] = Registry("method")
K = TypeVar("K", bound=Section)


def example_config(method: str, large: int = 2, small: int = 0, **method_kwargs: Any) -> DictConfig:
    """A config of a network so small that a step on random images takes a moment.

    Args:
        method: name of the method.
        large: number of large crops.
        small: number of small crops.
        **method_kwargs: settings of the method.

    Example:
        >>> example_config("debiased", tau_plus=0.2).method_kwargs
        {'tau_plus': 0.2}
    """
    crops = {"num_large_crops": large, "num_small_crops": small}
    rates = {"lr": 0.1, "classifier_lr": 0.1, "weight_decay": 0.0}
    return OmegaConf.create(
        {
            "method": method,
            "method_kwargs": method_kwargs,
            "backbone": {"name": "timm/resnet10t", "kwargs": {"channels": [8, 8, 8, 8]}},
            "data": {"dataset": "custom", "num_classes": 3, **crops},
            "augmentations": [
                {"crop_size": 32, "num_crops": large},
                {"crop_size": 16, "num_crops": small},
            ],
            "optimizer": {"name": "sgd", "batch_size": 4, **rates},
            "scheduler": {"name": "none"},
            "max_epochs": 1,
        }
    )


def fill_method_kwargs(cfg: DictConfig, kwargs_type: type[Section]) -> DictConfig:
    """Checks ``method_kwargs`` and writes its defaults into ``cfg``.

    Called by each method's ``add_and_assert_specific_cfg``, so that solo-learn's own
    scripts refuse a misspelt key too.

    Raises:
        ConfigError: unknown key, missing key, or value out of range.

    Example:
        >>> from solo_ext.methods.debiased import DebiasedKwargs
        >>> cfg = fill_method_kwargs(example_config("debiased", tau_plus=0.2), DebiasedKwargs)
        >>> cfg.method_kwargs.tau_plus, cfg.method_kwargs.temperature
        (0.2, 0.5)
    """
    from solo_ext.config.check import check_method_kwargs

    given = OmegaConf.to_container(cfg, resolve=True).get("method_kwargs")  # type: ignore[union-attr]
    cfg.method_kwargs = check_method_kwargs(kwargs_type, given or {}).model_dump()
    return cfg


def typed_kwargs(section: DictConfig, kwargs_type: type[K]) -> K:
    """Converts ``cfg.method_kwargs``, already checked, to the method's settings class.

    Example:
        >>> from solo_ext.methods.debiased import DebiasedKwargs
        >>> section = OmegaConf.create({"tau_plus": 0.2})
        >>> typed_kwargs(section, DebiasedKwargs).tau_plus
        0.2
    """
    return kwargs_type.model_validate(OmegaConf.to_container(section, resolve=True))


def require_two_views(cfg: DictConfig, small: bool = False) -> None:
    """Refuses any number of large crops but two, and small crops unless ``small`` allows them.

    Raises:
        ConfigError: the config has other crops; the message gives their numbers.

    Example:
        >>> require_two_views(example_config("pcl", large=3))
        Traceback (most recent call last):
        solo_ext.core.errors.ConfigError: augmentations='3 large and 0 small crops': pcl compares...
    """
    counts = cfg.data.num_large_crops, cfg.data.num_small_crops
    if counts[0] != 2 or (counts[1] and not small):
        raise ConfigError(
            "augmentations",
            f"{counts[0]} large and {counts[1]} small crops",
            f"{cfg.method} compares two views",
            f"give the largest crop_size num_crops: 2{'' if small else ', and no other'}",
        )


def has_indices(cfg: DictConfig) -> bool:
    """Whether batches contain their samples' indices; DALI's batches do only by an option.

    Example:
        >>> has_indices(example_config("pcl"))
        True
    """
    encoded = (cfg.get("dali") or {}).get("encode_indexes_into_labels")
    return bool(cfg.data.get("format") != "dali" or encoded)


def require_indices(cfg: DictConfig, purpose: str) -> None:
    """Refuses data whose batches lack the true sample indices.

    Args:
        cfg: the config.
        purpose: what the method does with them; part of the message.

    Raises:
        ConfigError: DALI reads the data without indices.

    Example:
        >>> cfg = example_config("pcl")
        >>> cfg.data.format = "dali"
        >>> require_indices(cfg, "looks clusters up")
        Traceback (most recent call last):
            ...
        solo_ext.core.errors.ConfigError: ...: pcl looks clusters up by sample index, which ...
    """
    if not has_indices(cfg):
        raise ConfigError(
            "dali.encode_indexes_into_labels",
            False,
            f"{cfg.method} {purpose} by sample index, which DALI's batches then lack",
            "set it to true",
        )


IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""
SHARE = 8
"""By default a queue, support set or prototype table has at most a row per this many images."""
_DOWNLOADED = {"cifar10": 50_000, "cifar100": 50_000, "stl10": 105_000}
"""Training images of data sets that solo-learn's script downloads only after making the method."""

Size = Callable[[int, int], int | list[int]]
"""Computes a default from the number of training images and the batch size."""


def scaled_clusters(*published: int) -> Size:
    """The numbers published for ImageNet in proportion to the images; at least 2, none twice.

    Example:
        >>> scaled_clusters(25000, 50000)(1400, 64)
        [27, 55]
        >>> scaled_clusters(25000, 50000)(50, 64)
        [2]
    """

    def sizes(images: int, batch: int) -> list[int]:
        scaled = (max(2, round(k * images / IMAGENET)) for k in published)
        return list(dict.fromkeys(scaled))

    return sizes


def capped_queue(published: int) -> Size:
    """The published size, or if fewer, whole batches (at least one) of one in ``SHARE`` images.

    Example:
        >>> capped_queue(16384)(1400, 64)
        128
    """
    return lambda images, batch: min(published, max(1, images // SHARE // batch) * batch)


def capped_prototypes(published: int) -> Size:
    """The published number, at most one per ``SHARE`` images; at least 2.

    Example:
        >>> capped_prototypes(65536)(1400, 64)
        175
    """
    return lambda images, batch: min(published, max(2, images // SHARE))


def fill_from_data(cfg: DictConfig, sizes: Mapping[str, Size], images: int | None) -> None:
    """Sets the keys of ``method_kwargs`` that are null, and logs them in one line.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        sizes: function that computes the value, by dotted key of ``method_kwargs``.
        images: number of training images; ``None`` counts them if a key needs the number.

    Raises:
        ConfigError: the images cannot be counted.

    Example:
        >>> cfg = example_config("pcl", queue_size=None)
        >>> fill_from_data(cfg, {"queue_size": capped_queue(16384)}, images=1400)
        >>> cfg.method_kwargs.queue_size
        172
    """
    kwargs = cfg.method_kwargs
    absent = {k: size for k, size in sizes.items() if OmegaConf.select(kwargs, k) is None}
    if not absent:
        return
    count = num_training_images(cfg.data) if images is None else images
    found = {key: size(count, cfg.optimizer.batch_size) for key, size in absent.items()}
    for key, value in found.items():
        OmegaConf.update(kwargs, key, value)
    listed = ", ".join(f"{key}={value}" for key, value in found.items())
    rank_zero_only(logger.info)(f"{cfg.method}: {listed} from {count:,} training images")


def num_training_images(data: Mapping[str, Any]) -> int:
    """Counts the training images, which solo-learn's script opens only after making the method.

    Args:
        data: the config's section ``data``; keys that the script does not read are ignored.

    Raises:
        ConfigError: the images cannot be read.

    Example:
        >>> num_training_images({"dataset": "cifar10"})
        50000
    """
    from solo_ext.config.check import known_keys, validated
    from solo_ext.config.schema import Images
    from solo_ext.data.images import open_images

    known = _DOWNLOADED.get(data["dataset"])
    if known is not None:
        return known
    given = known_keys(Images, data) | {"holdout": None, "unreadable": "refuse"}
    return len(open_images(validated(Images, given, prefix="data"), "train"))
