"""Crops of a batch, from decoded images in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from benchmarks.measure import Work
from benchmarks.operation import Case, Goal, Setup, peer
from benchmarks.record import Effort
from benchmarks.trainers import made_images
from solo_ext.config.schema import Augmentation
from solo_ext.core.files import config_root
from solo_ext.data.batch_augment import BatchAugment
from solo_ext.data.transforms import pretrain_transform

IMAGES, BATCH = 2000, 256
Pipelines = Sequence[Augmentation]


def batches_of(count: int, batch: int) -> Iterator[Any]:
    """Numbers of the next images, in the same order for every source."""
    return (np.arange(first, first + batch) % count for first in itertools.count(0, batch))


def by_torchvision(images: list[Image.Image], pipelines: Pipelines, batch: int) -> Work:
    """torchvision's transforms, image by image, collated."""
    transform, batches = pretrain_transform("custom", pipelines), batches_of(len(images), batch)

    def work() -> list[torch.Tensor]:
        views = [transform(images[i]) for i in next(batches)]
        return [torch.stack(crops) for crops in zip(*views, strict=True)]

    return work


def on_the_batch(images: list[Image.Image], pipelines: Pipelines, batch: int) -> Work:
    """Ours: drawn and computed for the batch."""
    pixels = as_tensor(images)
    height, width = pixels.shape[2:]
    augment = BatchAugment("custom", pipelines, height, width, 5)
    batches = batches_of(len(images), batch)

    def work() -> Any:
        samples = next(batches)
        return augment(pixels[samples], augment.draw(0, samples))

    return work


def by_kornia(K: Any, images: list[Image.Image], pipelines: Pipelines, batch: int) -> Work:
    """kornia's augmentations of a batch with the same settings."""
    pixels, batches = as_tensor(images), batches_of(len(images), batch)
    made = []
    for p in pipelines:
        size, scale = p.crop_size, (p.rrc.crop_min_scale, p.rrc.crop_max_scale)
        steps = [
            K.RandomResizedCrop((size, size), scale=scale, resample="bicubic"),
            K.ColorJitter(*p.color_jitter.strengths, p=p.color_jitter.prob),
            K.RandomGrayscale(p=p.grayscale.prob),
            K.RandomGaussianBlur((size // 20 * 2 + 1,) * 2, (0.1, 2.0), p=p.gaussian_blur.prob),
            K.RandomSolarize(p=p.solarization.prob),
            K.RandomHorizontalFlip(p=p.horizontal_flip.prob),
            K.Normalize(torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])),
        ]
        # One that is never taken would still cost its draws.
        taken = [step for step in steps if step.p > 0]
        made += [K.AugmentationSequential(*taken, data_keys=["input"])] * p.num_crops

    @torch.no_grad()
    def work() -> list[torch.Tensor]:
        x = pixels[next(batches)].float() / 255
        return [augment(x) for augment in made]

    return work


def as_tensor(images: list[Image.Image]) -> torch.Tensor:
    """(n, 3, H, W) uint8."""
    return (
        torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2).contiguous()
    )


def setup(effort: Effort, side: int, name: str, size: int) -> Setup:
    """All sources on the same images."""
    augmentations = config_root() / "solo_ext" / "augmentations" / f"{name}.yaml"
    entries = yaml.safe_load(augmentations.read_text())
    pipelines = [Augmentation(**e).model_copy(update={"crop_size": size}) for e in entries]
    given = made_images(effort.size(IMAGES), side), pipelines, effort.size(BATCH)
    return Setup(
        {
            "ours": on_the_batch(*given),
            "torchvision": by_torchvision(*given),
            "kornia": peer("kornia.augmentation", lambda module: by_kornia(module, *given)),
        }
    )


def case(side: int, name: str, size: int, torchvision: float = 0, kornia: float = 0) -> Case:
    """The crops of one config, and how many times faster they are to be."""
    goals = Goal("torchvision", torchvision), Goal("kornia", kornia)
    return Case(
        f"augmentation {name}, {side} px to {size}",
        partial(setup, side=side, name=name, size=size),
        goals,
    )


CASES = (
    case(32, "cifar", 32, torchvision=5, kornia=3),
    case(32, "small32", 32),
    case(64, "mocov2_128", 64),
    case(96, "small32", 32),
    case(128, "mocov2_128", 128),
)
