"""Defaults that follow the number of training images.

Papers give them for ImageNet. Numbers of clusters keep their proportion to its images. Queues,
support sets and learned prototypes keep theirs, up to an eighth of the images: an image then finds
its own embedding of the epoch before in a queue less than once in a hundred times (half the share
squared, where each epoch has an order of its own), and a prototype has eight images or more. A
queue holds one batch at the least, however few the images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from solo_ext.methods.registry import logger

IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""
SHARE = 8
"""Training images for each row of a queue, support set or table of prototypes, at the least."""
_DOWNLOADED = {"cifar10": 50_000, "cifar100": 50_000, "stl10": 105_000}
"""Those that solo-learn's own script downloads after it has made the method."""

Size = Callable[[int, int], int | list[int]]
"""What a default is, from the number of training images and the batch size."""


def clusters(*published: int) -> Size:
    """The published numbers for ImageNet, in proportion; at least 2."""
    return lambda images, batch: [max(2, round(k * images / IMAGENET)) for k in published]


def queue(published: int) -> Size:
    """The published rows, up to the share, in whole batches and at least one."""
    return lambda images, batch: min(published, max(1, images // SHARE // batch) * batch)


def prototypes(published: int) -> Size:
    """The published number, up to the share; at least 2."""
    return lambda images, batch: min(published, max(2, images // SHARE))


def fill_from_data(cfg: DictConfig, sizes: Mapping[str, Size], images: int | None) -> None:
    """Gives the keys of ``method_kwargs`` that are null their size, and says so in one line.

    A run that begins with another's checkpoint takes what was recorded beside it.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        sizes: by dotted key of ``method_kwargs``.
        images: training images; by default they are counted if a key needs it.

    Raises:
        ConfigError: there are no images to count.
    """
    kwargs = cfg.method_kwargs
    absent = {k: size for k, size in sizes.items() if OmegaConf.select(kwargs, k) is None}
    if not absent:
        return
    found = {k: v for k in absent if (v := _recorded(cfg, k)) is not None}
    source = "the checkpoint's run"
    if found.keys() != absent.keys():
        count = num_training_images(cfg.data) if images is None else images
        source = f"{count:,} training images"
        batch = cfg.optimizer.batch_size
        found = {k: found.get(k) or size(count, batch) for k, size in absent.items()}
    for key, value in found.items():
        OmegaConf.update(kwargs, key, value)
    listed = ", ".join(f"{key}={value}" for key, value in found.items())
    rank_zero_only(logger.info)(f"{cfg.method}: {listed} from {source}")


def num_training_images(data: Mapping[str, Any]) -> int:
    """Training images of solo-learn's own script, which opens them after it has made the method.

    Args:
        data: the section of the config; what that script does not read changes nothing.

    Raises:
        ConfigError: they cannot be read.
    """
    from solo_ext.data.images import open_images

    known = _DOWNLOADED.get(data["dataset"])
    if known is not None:
        return known
    given = {"format": "image_folder", **data, "holdout": None, "unreadable": "refuse"}
    return len(open_images(given, "train"))


def _recorded(cfg: DictConfig, key: str) -> int | list[int] | None:
    """The size that the run whose checkpoint this one begins with had, if its file holds one."""
    checkpoint = cfg.get("resume_from_checkpoint")
    try:
        held = json.loads(Path(checkpoint or "").with_name("args.json").read_text())
        value: Any = held["method_kwargs"] if held["method"] == cfg.method else None
        # Plain look-ups: nothing in a file of a run is resolved.
        for name in key.split("."):
            value = value[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    numbers = value if isinstance(value, list) else [value]
    return value if numbers and all(type(n) is int and n > 0 for n in numbers) else None
